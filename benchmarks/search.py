"""How fast log lines are stored and found, in how many bytes.

    python benchmarks/search.py --lines 10_000_000 --data-dir bench-search
    python benchmarks/search.py --lines 200_000 --json
    python benchmarks/search.py --lines 200_000 --all-runs

A real server takes lines of 64 ranks on 8 nodes over HTTP, in batches as a collector sends them,
and answers searches over HTTP. With --data-dir the lines stay: a run that was stopped goes on, and
one with more lines adds to them. CPU is that of the server process; wall times beside it are those
of a shared machine, and other work on its cores makes CPU dearer too: `load` says how much.

Bars, of issue 16: word, phrase, prefix and filters 100 ms, substring and regular expression 300 ms
(p95 of CPU), 40 bytes a line, 60,000 lines per second of CPU.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rankscope.wire import schema, zstd

RUN = "search"
NODES, RANKS_PER_NODE = 8, 8
LINES_PER_BATCH = 2_000
START_NS = 1_790_000_000 * 10**9
LINE_NS = 2_000_000  # 500 lines a second in all
SECONDS_TO_START = 60.0
BARS = {
    "word": 100, "phrase": 100, "prefix": 100, "filter": 100, "substring": 300, "regex": 300,
}  # fmt: skip
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/job/train.py", line {line}, in step\n'
    "    loss.backward()\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate {mib} MiB"
)
# What stands before a batch of a million lines once: what is rare.
NEEDLE = "NCCL watchdog: ncclRemoteError: remote process exited, peer 10.0.{a}.{b}, ticket-{n:06d}"


def _templates() -> list[tuple[int, str, str, int, Callable[[random.Random, int], str]]]:
    """Return (weight, logger, stream, level, text) of what ranks say."""
    return [
        (36, "train", "logging", 20, lambda r, s: (
            f"step {s} done in {0.4 + 0.1 * r.random():.3f} s, {r.randrange(90_000, 120_000)} "
            f"tokens/s, grad_norm {r.expovariate(1):.3f}, lr {3e-4 * r.random():.2e}")),
        (4, "train", "logging", 20, lambda r, s: f"step {s} loss {r.gauss(2.5, 0.3):.4f}"),
        (15, "train.data", "logging", 10, lambda r, s: (
            f"worker {r.randrange(8)}: opened /data/c4/shard-{r.randrange(20_000):05d}.tar, "
            f"{r.randrange(1, 4096)} samples in {r.randrange(2, 90)} ms")),
        (10, "nccl", "stderr", 20, lambda r, s: (
            f"node-{'abcdefgh'[r.randrange(8)]}:{r.randrange(1000, 9000)}:{r.randrange(10_000)} "
            f"[{r.randrange(8)}] NCCL INFO Channel {r.randrange(16):02d}/0 : {r.randrange(64)}[7] "
            f"-> {r.randrange(64)}[0] [send] via NET/IB/{r.randrange(8)}/GDRDMA")),
        (8, "train.memory", "logging", 10, lambda r, s: (
            f"cuda:{r.randrange(8)} allocated {r.uniform(20, 70):.2f} GiB, reserved "
            f"{r.uniform(60, 79):.2f} GiB after step {s}")),
        (10, "", "stdout", 20, lambda r, s: (
            f"Epoch {s // 1000}:  {r.randrange(100):2d}%|\u2588\u2588\u258c   | {s % 1000}/1000 "
            f"[{r.randrange(60):02d}:{r.randrange(60):02d}<12:04,  {r.uniform(1, 2):.2f}s/it]")),
        (7, "rendezvous", "logging", 20, lambda r, s: (
            f"heartbeat {r.randrange(16**8):08x} of agent {r.randrange(64)} answered in "
            f"{r.randrange(1, 40)} ms")),
        (3, "train.optimizer", "logging", 30, lambda r, s: (
            f"gradient norm {r.uniform(10, 40):.1f} is above 10.0, clipped")),
        (3, "checkpoint", "logging", 20, lambda r, s: (
            f"saved checkpoint ckpt-{s:07d} to /ckpt/run/{s} in {r.uniform(1, 30):.1f} s")),
        (1, "train", "stderr", 40, lambda r, s: (
            TRACEBACK.format(line=r.randrange(400), mib=r.randrange(2, 4000)))),
    ]  # fmt: skip


def make_batch(number: int) -> bytes:
    """Return the packed body of a batch; the same number gives the same one."""
    draw = random.Random(number)
    templates = _templates()
    weights = [template[0] for template in templates]
    node = number % NODES
    first = number * LINES_PER_BATCH
    records: list[schema.LogLine] = []
    for at, template in enumerate(draw.choices(templates, weights, k=LINES_PER_BATCH)):
        _, logger, stream, level, text = template
        time_ns = START_NS + (first + at) * LINE_NS + draw.randrange(10**9)
        step = 1 + (first + at) // 20_000
        message = text(draw, step)
        if at == 0 and number % (1_000_000 // LINES_PER_BATCH) == 7:
            message = NEEDLE.format(a=draw.randrange(9), b=draw.randrange(250), n=number)
        records.append(
            schema.LogLine(
                attempt=0, rank=node * RANKS_PER_NODE + draw.randrange(RANKS_PER_NODE),
                time_ns=time_ns, level=level, message=message, logger=logger,
                stream=stream, step=step if stream == "logging" else 0,  # type: ignore[arg-type]
                fields={"shard": str(draw.randrange(100))} if logger == "train.data" else {},
            )
        )  # fmt: skip
    body = {
        "schema_version": schema.SCHEMA_VERSION, "run_id": RUN, "producer": f"collector-{node}",
        "sequence": 1 + number // NODES, "host": f"node-{'abcdefgh'[node]}",
        "sent_ns": records[-1].time_ns, "records": records, "chunks": [],
    }  # fmt: skip
    return zstd.pack(msgspec.msgpack.encode(body), 3)


def queries(num_lines: int, draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (kind, query), common and rare ones."""
    last_step = 1 + num_lines // 20_000
    step = draw.randrange(1, last_step + 1)
    rank = draw.randrange(64)
    number = 7 + (1_000_000 // LINES_PER_BATCH) * draw.randrange(max(1, num_lines // 1_000_000))
    yield from (
        ("word", "step"), ("word", "loss"), ("word", "checkpoint"), ("word", "ncclRemoteError"),
        ("word", "remote"), ("word", f"{draw.randrange(16**8):08x}"), ("word", f"{number:06d}"),
        ("word", "nothing"), ("word", "clipped -step"), ("word", "checkpoint OR OutOfMemoryError"),
        ("word", f"{draw.randrange(20_000):05d}"), ("word", "7"), ("word", "4095 samples"),
        ("phrase", '"out of memory"'), ("phrase", '"remote process exited"'),
        ("phrase", f'"step {step}"'), ("phrase", '"lr 1.00e"'), ("phrase", '"is above 10.0"'),
        ("phrase", f"ckpt-{step:07d}"),
        ("prefix", "ckpt*"), ("prefix", "ncclRem*"), ("prefix", f"ticket-{number:06d}*"),
        ("prefix", f"{draw.randrange(4096):03x}*"), ("prefix", "check*"), ("prefix", "st*"),
        ("filter", ""), ("filter", f"rank:{rank}"), ("filter", "level:>=warning"),
        ("filter", f"rank:{rank} level:error"), ("filter", "host:node-c logger:checkpoint"),
        ("filter", f"step:{step}"), ("filter", f"step:{step} rank:{rank} loss"),
        ("filter", f"rank:{rank} level:error memory"), ("filter", "stream:stderr -logger:nccl"),
        ("filter", "since:-10m level:>=warning"), ("filter", "host:node-h ncclRemoteError"),
        ("substring", "*moteerr*"), ("substring", "*oint*"), ("substring", "*hard-0042*"),
        ("substring", f"*{draw.randrange(16**5):05x}*"), ("substring", "*ZZZ*"),
        ("substring", "*dient norm*"),
        ("regex", r"/took \d+ ms/"), ("regex", r"/allocate 3\d{3} MiB/"),
        ("regex", r"/loss [0-9]\.99\d\d/"), ("regex", r"/peer 10\.0\.\d+\.\d+/"),
        ("regex", r"/^step \d+1 .*lr 2\.9/"), ("regex", r"/\d{4}z/"), ("regex", "/ncclre.*err/i"),
    )  # fmt: skip


class Server:
    """`rankscope serve` as its own process."""

    def __init__(self, folder: Path, *flags: str) -> None:
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        command = [
            sys.executable, "-m", "rankscope_server.cli", "--port", "0", "--data-dir", str(folder),
            "--ready-file", str(ready), "--look-seconds", "3600", *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + SECONDS_TO_START
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.05)
        address = urllib.parse.urlsplit(json.loads(ready.read_text())["url"])
        self.http = http.client.HTTPConnection(str(address.hostname), address.port, timeout=600)

    def cpu_seconds(self) -> float:
        """Return what all its threads have used."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def post(self, body: bytes) -> None:
        headers = {"Content-Encoding": "zstd", "Content-Type": "application/msgpack"}
        self.http.request("POST", "/api/v1/ingest", body, headers)
        reply = self.http.getresponse()
        text = reply.read()
        if reply.status != 200:
            raise RuntimeError(text.decode())

    def get(self, path: str, **params: Any) -> tuple[int, dict[str, Any]]:
        query = urllib.parse.urlencode(params)
        self.http.request("GET", f"/api/v1/{path}?{query}")
        reply = self.http.getresponse()
        return reply.status, json.loads(reply.read())

    def close(self) -> None:
        self.http.close()
        self.process.terminate()
        self.process.wait(60)


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Server]:
    server = Server(folder, *flags)
    try:
        yield server
    finally:
        server.close()


def fill(server: Server, num_lines: int) -> dict[str, float]:
    """Send what is missing of the lines."""
    status, answer = server.get(f"runs/{RUN}")
    stored = answer["counts"]["log_lines"] if status == 200 else 0
    numbers = range(stored // LINES_PER_BATCH, num_lines // LINES_PER_BATCH)
    if not numbers:
        return {}
    cpu, started = 0.0, time.perf_counter()
    for number in numbers:
        body = make_batch(number)
        before = server.cpu_seconds()
        server.post(body)
        cpu += server.cpu_seconds() - before
        if number % 100 == 0:
            print(f"{(number + 1) * LINES_PER_BATCH:,} lines", file=sys.stderr)
    count = len(numbers) * LINES_PER_BATCH
    return {
        "lines": count, "lines_per_cpu_second": round(count / cpu),
        "wall_seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def measure(
    server: Server, path: str, num_lines: int, rounds: int, limit: int
) -> list[dict[str, Any]]:
    """Return a row for each kind of query, of one run or of all."""
    taken: dict[str, list[tuple[float, float, str]]] = {}
    for number in range(rounds + 1):
        for kind, query in queries(num_lines, random.Random(number)):
            before, started = server.cpu_seconds(), time.perf_counter()
            status, answer = server.get(path, q=query, limit=limit)
            wall = time.perf_counter() - started
            cpu = server.cpu_seconds() - before
            if status != 200:
                raise RuntimeError(f"{query}: {answer}")
            if number:  # the first round warms up
                taken.setdefault(kind, []).append((1e3 * cpu, 1e3 * wall, query))
    return [_row(kind, rows) for kind, rows in taken.items()]


def _row(kind: str, rows: list[tuple[float, float, str]]) -> dict[str, Any]:
    cpu = sorted(row[0] for row in rows)
    wall = sorted(row[1] for row in rows)
    slowest: dict[str, float] = {}
    for ms, _, query in rows:
        slowest[query] = max(ms, slowest.get(query, 0.0))
    worst = sorted(slowest.items(), key=lambda item: -item[1])[:4]
    return {
        "kind": kind, "searches": len(rows), "cpu_ms_median": round(statistics.median(cpu), 1),
        "cpu_ms_p95": round(_p95(cpu), 1), "wall_ms_median": round(statistics.median(wall), 1),
        "wall_ms_p95": round(_p95(wall), 1), "bar_ms": BARS[kind],
        "slowest": {query: round(ms, 1) for query, ms in worst},
    }  # fmt: skip


def _p95(values: list[float]) -> float:
    return values[min(len(values) - 1, int(0.95 * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=100, help="lines of a page, as the web asks")
    parser.add_argument("--all-runs", action="store_true", help="search over all runs")
    parser.add_argument("--data-dir", type=Path, help="keep the lines here")
    parser.add_argument("--database-url", help="another database than SQLite in the folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    flags = ["--database-url", arguments.database_url] if arguments.database_url else []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.data_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        with serving(folder, *flags) as server:
            ingest = fill(server, arguments.lines)
            path = "search" if arguments.all_runs else f"runs/{RUN}/logs"
            rows = measure(server, path, arguments.lines, arguments.rounds, arguments.limit)
        size = sum(path.stat().st_size for path in folder.glob("*.db*"))
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[1], 1)}
    answer = {
        "machine": machine, "lines": arguments.lines, "limit": arguments.limit,
        "bytes_per_line": round(size / arguments.lines, 1), "ingest": ingest, "rows": rows,
    }  # fmt: skip
    print(json.dumps(answer) if arguments.json else json.dumps(answer, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
