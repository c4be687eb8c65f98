"""Damage the end of the log of a killed server: it starts, and what is there is a clean prefix.

    python benchmarks/torn_writes.py                  # 40 times, SQLite's write-ahead log
    python benchmarks/torn_writes.py --where database # the database file itself

Several servers are killed under load (as benchmarks/kill_server.py does). Copies of what each left
are damaged at random: the log is cut off, or from there on zeros or noise, or one sector or bit of
it is another one; not before what a checkpoint has copied, as that was synced before. Then a server
starts on it. It must hold of each producer the batches 1 to some number, each one whole: its metric
row, log line, chunk and sums; `PRAGMA integrity_check` must find nothing; and it must take more.

A database file that is damaged itself (`--where database`) is beyond that: there the server must
say so in a sentence, at its start or as an answer, and never fail. Appends one line to
benchmarks/results/torn_writes.jsonl; exit status 1 where anything of this failed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.kill_server import (
    EVENTS_PER_BATCH,
    RUN,
    Producer,
    Server,
    make_batch,
    stored_batches,
    stored_events,
)
from tests.server.wal import HEADER_BYTES, read_wal

RESULTS = Path(__file__).parent / "results" / "torn_writes.jsonl"
FILE = "rankscope.db"
PRODUCERS = 4
PER_KILL = 5  # copies of what one killed server left
SECTOR_BYTES = 512
PAGES = ("", "/logs", "/ranks", "/collectives", "/findings", "/metrics")


@dataclass
class Result:
    """What was damaged and what came of it."""

    where: str
    seed: int
    damages: dict[str, int] = field(default_factory=dict)
    clean: int = 0  # started, all of it whole
    said_so: dict[str, int] = field(default_factory=dict)  # the sentence of a refusal
    acknowledged: int = 0
    kept: int = 0  # of these
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def killed_under_load(folder: Path, seconds: float, *flags: str) -> dict[int, int]:
    """Leave in the folder what a killed server leaves; return what each producer had stored."""
    server, stop = Server(folder, *flags), threading.Event()
    server.start()
    producers = [Producer(index, server.port, stop) for index in range(PRODUCERS)]
    for producer in producers:
        producer.start()
    time.sleep(seconds)
    stop.set()
    server.kill()
    for producer in producers:
        producer.give_up()
        producer.join(30)
    return {producer.index: producer.acknowledged for producer in producers}


def damage_log(rng: random.Random, folder: Path) -> str:
    """Damage the log where it may be torn; return how."""
    wal = read_wal(folder / FILE)
    file = folder / f"{FILE}-wal"
    data = bytearray(file.read_bytes())
    first = max(wal.taken, HEADER_BYTES)
    if first >= wal.end:
        return "nothing to tear"  # a checkpoint has copied all of it
    at = rng.randrange(first, wal.end)
    how = rng.choice(("cut", "zeros", "noise", "sector", "bit"))
    _change(rng, data, at, how)
    file.write_bytes(data)
    (folder / f"{FILE}-shm").unlink()  # an index in memory, which no loss of power survives
    return how


def damage_database(rng: random.Random, folder: Path) -> str:
    """Damage the database file anywhere; return how."""
    file = folder / FILE
    data = bytearray(file.read_bytes())
    how = rng.choice(("cut", "zeros", "noise", "sector", "head"))
    at = 0 if how == "head" else rng.randrange(len(data))
    _change(rng, data, at, "sector" if how == "head" else how)
    file.write_bytes(data)
    return how


def _change(rng: random.Random, data: bytearray, at: int, how: str) -> None:
    if how == "cut":
        del data[at:]
    elif how == "zeros":
        data[at:] = bytes(len(data) - at)
    elif how == "noise":
        data[at:] = rng.randbytes(len(data) - at)
    elif how == "sector":
        at -= at % SECTOR_BYTES
        data[at : at + SECTOR_BYTES] = rng.randbytes(len(data[at : at + SECTOR_BYTES]))
    else:
        data[at] ^= 1 << rng.randrange(8)


def look(folder: Path, result: Result, label: str) -> dict[int, int]:
    """Start a server on a copy, compare all it holds; return the last batch of each producer."""
    server = Server(folder)
    last: dict[int, int] = {}
    try:
        server.start()
        found = stored_batches(f"sqlite:///{folder / FILE}", server.port)
        batches = set(found["batches"])
        last = {index: sum(one == index for one, _ in batches) for index in range(PRODUCERS)}
        prefix = {(index, n) for index in last for n in range(1, last[index] + 1)}
        wrong = [
            name
            for name, pairs in found.items()
            if set(pairs) != prefix or len(pairs) != len(prefix)
        ]
        if stored_events(f"sqlite:///{folder / FILE}") != len(prefix) * EVENTS_PER_BATCH:
            wrong.append("events in sums")
        wrong += takes_more(server, last)
        if wrong:
            result.failures.append(f"{label}: not a clean prefix: {', '.join(wrong)}")
    finally:
        server.kill()
    with sqlite3.connect(folder / FILE) as database:
        verdict = database.execute("PRAGMA integrity_check").fetchone()[0]
    database.close()
    if verdict != "ok":
        result.failures.append(f"{label}: {verdict}")
    lines = server.log.read_text().splitlines()
    result.failures += [f"{label}: {line}" for line in lines if "Traceback" in line]
    return last


def takes_more(server: Server, last: dict[int, int]) -> list[str]:
    """Send the next batch of a producer, twice."""
    url, body = f"http://127.0.0.1:{server.port}/api/v1/ingest", make_batch(0, last[0] + 1)
    answers = []
    for _ in range(2):
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as reply:
            answers.append(json.load(reply)["duplicate"])
    return [] if answers == [False, True] else [f"the next batch was answered with {answers}"]


def look_at_damaged(folder: Path, result: Result, label: str) -> None:
    """Start a server on a damaged database: whatever it says is a sentence."""
    server = Server(folder)
    try:
        server.start("health")
    except RuntimeError:
        lines = [line for line in server.log.read_text().splitlines() if "is at http" not in line]
        if len(lines) == 1:
            count(result.said_so, lines[0].replace(str(folder), "FOLDER"))
        else:
            result.failures.append(f"{label}: did not start and said {lines[-3:]}")
        return
    try:
        sentences = {what for path in PAGES if (what := asked(server, path))}
        failed = [what for what in sentences if what.startswith("500")]
        result.failures += [f"{label}: {what}" for what in failed]
        for what in sentences - set(failed):
            count(result.said_so, what)
        result.clean += not sentences
    finally:
        server.kill()


def asked(server: Server, page: str) -> str:
    """Return the status and the sentence of a page that is not answered."""
    url = f"http://127.0.0.1:{server.port}/api/v1/runs/{RUN}{page}"
    try:
        with urllib.request.urlopen(url, timeout=30):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {json.load(error)['error']['what']}"


def count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1


def measure(result: Result, times: int) -> None:
    """Kill, damage and look so many times; fill the result."""
    rng, began = random.Random(result.seed), time.monotonic()
    for number in range(times):
        if number % PER_KILL == 0:
            left = tempfile.TemporaryDirectory(prefix="rankscope-torn-")
            acknowledged = killed_under_load(Path(left.name), rng.uniform(0.5, 4.0))
        with tempfile.TemporaryDirectory(prefix="rankscope-torn-") as name:
            folder = Path(name) / "data"
            shutil.copytree(left.name, folder)
            harm = damage_log if result.where == "log" else damage_database
            how = harm(rng, folder)
            count(result.damages, how)
            label = f"{number} ({how})"
            if result.where == "database":
                look_at_damaged(folder, result, label)
                continue
            before = len(result.failures)
            last = look(folder, result, label)
            result.clean += len(result.failures) == before
            result.acknowledged += sum(acknowledged.values())
            result.kept += sum(min(last[index], acknowledged[index]) for index in last)
        if number % PER_KILL == PER_KILL - 1:
            left.cleanup()
    result.seconds = time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--where", choices=("log", "database"), default="log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object, keep nothing")
    choices = parser.parse_args()
    result = Result(choices.where, choices.seed)
    measure(result, choices.count)
    line = json.dumps(asdict(result) | {"passed": not result.failures})
    print(line)
    if not choices.json:
        with RESULTS.open("a") as file:
            file.write(line + "\n")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
