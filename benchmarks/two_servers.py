"""Kill and stop two servers on one PostgreSQL under load: is all there, once, and found as ever?

    python benchmarks/two_servers.py                     # 5 rounds of 10 events
    python benchmarks/two_servers.py --rounds 1 --events 3 --json

A round: two real server processes on a real PostgreSQL, collectors that send several runs, each
batch until it is acknowledged by either server. At random moments a server is killed (SIGKILL) and
started again, or stopped (SIGSTOP) and woken (SIGCONT). Then the store is compared with what was
acknowledged, and with that of a third server that took the same batches undisturbed meanwhile:
batches, sums of collectives, steps, lines, numbers, ranks, findings. A round is one line of JSON in
`--results`; a round of the same seed and size that is there already is not repeated. Exit status 1
on any difference, and where a run moved later than the bar.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rankscope.wire import schema, zstd
from rankscope_server.store.lines import read_body, read_head
from rankscope_server.store.packing import unpack_array
from rankscope_server.store.tables import log_block, log_lines
from rankscope_server.store.tiles import dtype_of
from tests.ports import free_port
from tests.server.postgres import Postgres
from tests.server.seed import seed_with

RESULTS = Path(__file__).parent / "results" / "two_servers.jsonl"
RUNS, RANKS, RANKS_PER_NODE = 3, 4, 2
STEP_SECONDS, STEPS_PER_BATCH = 0.15, 5  # about what the runs take for a step
ANSWER_SECONDS = 3.0  # a collector then asks the other server
MOVES_SECONDS = 10.0  # the bar
TERM_SECONDS = 4.0  # a server that is stopped for less keeps its work
START_SECONDS = 90.0
FAULTS = ("slow_compute", "slow_data", "none")
LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 1.0, 4.0
AnyResult = TypeVar("AnyResult", bound="Result")


@dataclass
class Result:
    """One round."""

    seed: int
    events: int
    kills: int = 0
    stops: int = 0
    batches: int = 0  # all of them acknowledged
    sends: int = 0
    repeats_without_effect: int = 0  # the other server, or this one before it died, had stored it
    unanswered: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    moves: int = 0  # leases of runs that a death or a long stop moved
    move_seconds: list[float] = field(default_factory=list)  # until the other has looked at all
    refused_writes: int = 0  # of a server that had lost its lease
    lost: dict[str, int] = field(default_factory=dict)
    twice: dict[str, int] = field(default_factory=dict)
    differs: dict[str, int] = field(default_factory=dict)  # from the undisturbed store
    findings: int = 0
    only_here: list[str] = field(default_factory=list)  # of those that are open at the end
    only_undisturbed: list[str] = field(default_factory=list)
    over_only_here: list[str] = field(default_factory=list)  # opened and recovered in between
    seconds: float = 0.0
    ended: bool = True  # all was found as over, in time

    @property
    def passed(self) -> bool:
        wrong = [*self.lost.values(), *self.twice.values(), *self.differs.values()]
        is_slow = max(self.move_seconds, default=0.0) > MOVES_SECONDS
        return self.ended and not any(wrong) and not is_slow


class Server:
    """`rankscope serve` on a port that stays the same."""

    def __init__(self, folder: Path, url: str) -> None:
        self.port, self.folder, self.url = free_port(), folder, url
        self.flags: tuple[str, ...] = ()
        self.environ: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        self.folder.mkdir(exist_ok=True)
        command = [
            sys.executable, "-m", "rankscope_server.cli", "--port", str(self.port),
            "--data-dir", str(self.folder), "--database-url", self.url, *self.flags,
        ]  # fmt: skip
        with (self.folder / "log").open("ab") as log:
            environ = os.environ | self.environ
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ)
        return self

    def wait(self, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self.ask("/api/v1/ready")
                return
            time.sleep(0.05)
        raise RuntimeError(f"a server did not start: {(self.folder / 'log').read_text()[-2000:]}")

    def ask(self, path: str) -> bytes:
        address = f"http://127.0.0.1:{self.port}{path}"
        with urllib.request.urlopen(address, timeout=30) as reply:
            return bytes(reply.read())

    def count(self, name: str) -> float:
        lines = [line.split() for line in self.ask("/metrics").decode().splitlines()]
        return next(float(line[1]) for line in lines if line[0] == f"rankscope_{name}")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
            self.process.wait()


@dataclass(frozen=True)
class Packed:
    """A batch as it is sent."""

    producer: str
    sequence: int
    body: bytes


class Collector(threading.Thread):
    """Sends the batches of one node, in order, each until a server has acknowledged it."""

    def __init__(self, batches: list[Packed], ports: list[int], seed: int) -> None:
        super().__init__(daemon=True)
        self.batches, self.ports = batches, ports
        self.pause_seconds = STEPS_PER_BATCH * STEP_SECONDS
        self.draw = random.Random(seed)
        self.acknowledged: list[tuple[str, int]] = []
        self.statuses: Counter[str] = Counter()
        self.sends = self.repeats = 0
        self.connections: dict[int, http.client.HTTPConnection] = {}

    def run(self) -> None:
        began = time.monotonic()
        for number, batch in enumerate(self.batches):
            time.sleep(max(0.0, began + number * self.pause_seconds - time.monotonic()))
            for port in itertools.cycle(self.draw.sample(self.ports, len(self.ports))):
                if self.send(port, batch.body):
                    break
                time.sleep(0.1)
            self.acknowledged.append((batch.producer, batch.sequence))
        for connection in self.connections.values():
            connection.close()

    def send(self, port: int, body: bytes) -> bool:
        """Return whether a server acknowledged."""
        self.sends += 1
        connection = self.connections.pop(port, None)
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        try:
            connection.request("POST", "/api/v1/ingest", body, {"Content-Encoding": "zstd"})
            reply = connection.getresponse()
            answer = json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError):
            connection.close()
            self.statuses["none"] += 1
            return False
        self.connections[port] = connection
        self.statuses[str(reply.status)] += 1
        if reply.status != 200:
            return False
        self.repeats += bool(answer["duplicate"])
        return True


class Store:
    """Reads a database beside its servers."""

    def __init__(self, url: str) -> None:
        address = url.replace("postgresql:", "postgresql+psycopg:")
        self.engine = sa.create_engine(address, poolclass=sa.NullPool)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(sa.text(statement))]

    def owned_by(self, server: Server) -> int:
        """Return how many runs a process looks at, by the database."""
        assert server.process is not None
        names = self.rows(
            "SELECT server.name FROM lease JOIN server ON server.id = lease.owner"
            " WHERE lease.run_id <> ''"
        )
        return sum(name.endswith(f" {server.process.pid}") for (name,) in names)

    def content(self) -> dict[str, Counter[Any]]:
        """Return what a store holds of all runs, without what depends on when it came."""
        tiles = {
            (*row[:5], unpack_array(row[5], dtype_of(row[1])).tobytes())
            for row in self.rows(
                "SELECT run_id, metric, attempt, step_block, rank_block, data FROM step_tile"
            )
        }
        return {
            "chunks": self._counted(
                "SELECT run_id, kind, attempt, rank, step_lo, step_hi, count, md5(data) FROM chunk"
            ),
            "step tiles": Counter(tiles),
            "sums of collectives": self._counted(
                'SELECT run_id, operation, "group", size_bytes, count, open, sum_ns, min_ns,'
                " max_ns, blocked_ns FROM op_rollup"
            ),
            "numbers": self._counted("SELECT run_id, name, rank, step, attempt, value FROM metric"),
            "ranks": self._counted(
                "SELECT run_id, attempt, rank, host, step, ended_ns, end_reason, state FROM rank"
            ),
            "errors": self._counted("SELECT run_id, rank, type, message, time_ns FROM error_event"),
            "events": self._counted("SELECT run_id, rank, name, time_ns FROM event"),
            "samples": self._counted(
                "SELECT run_id, host, kind, time_lo_ns, time_hi_ns, count FROM sample_span"
            ),
            "log lines": self._lines(),
            "runs": self._counted(
                "SELECT run_id, name, step, status, world_size, attempt FROM run"
            ),
        }

    def findings(self, is_over: bool) -> Counter[Any]:
        """Return findings that are over, or those that are not."""
        rows = self.rows("SELECT run_id, attempt, key, state, body FROM finding")
        found: Counter[Any] = Counter()
        for run_id, attempt, key, state, body in rows:
            if (state == "recovered") != is_over:
                continue
            one = json.loads(body)
            facts = (one["kind"], one["severity"], tuple(one["ranks"]), one["onset_step"])
            found[(run_id, attempt, key, *facts)] += 1
        return found

    def _counted(self, statement: str) -> Counter[Any]:
        return Counter(self.rows(statement))

    def _lines(self) -> Counter[Any]:
        """Return the lines of programs; those that an analysis wrote depend on when it looked."""
        found: Counter[Any] = Counter()
        finding = {
            number for (number,) in self.rows("SELECT id FROM log_word WHERE word = 'finding'")
        }
        with self.engine.connect() as connection:
            rows = connection.execute(
                sa.select(log_block.c.run_id, log_lines).join_from(
                    log_block, log_lines, log_block.c.id == log_lines.c.block_id
                )
            )
            for row in rows:
                head, body = read_head(row.head, row.block_id), read_body(row.body)
                for index in range(len(head.time_ns)):
                    if int(head.stream[index]) not in finding:
                        message, _ = body.line(index)
                        time_ns, rank = int(head.time_ns[index]), int(head.rank[index])
                        found[row.run_id, time_ns, rank, message] += 1
        return found


def make_batches(seed: int, seconds: float) -> list[list[Packed]]:
    """Return the batches of each node of all runs, which end when they have been sent."""
    # All begin at the same time: none is an earlier run that another one is compared with.
    steps, start_ns = int(seconds / STEP_SECONDS), time.time_ns()
    nodes: dict[str, list[Packed]] = {}
    for number in range(RUNS):

        def take(body: bytes) -> None:
            batch = msgspec.msgpack.decode(zstd.unpack(body, 1 << 30), type=schema.Batch)
            nodes.setdefault(batch.producer, []).append(
                Packed(batch.producer, batch.sequence, body)
            )

        seed_with(
            take, run_id=f"run-{number}", ranks=RANKS, ranks_per_node=RANKS_PER_NODE, steps=steps,
            steps_per_batch=STEPS_PER_BATCH, fault=FAULTS[number % len(FAULTS)],
            seed=seed * RUNS + number, start_ns=start_ns,
        )  # fmt: skip
    return list(nodes.values())


def disturb(result: Result, servers: list[Server], store: Store, draw: random.Random) -> None:
    """Kill and stop servers at random moments, one at a time."""
    for _ in range(result.events):
        time.sleep(draw.uniform(LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS))
        victim = draw.choice(servers)
        (other,) = (server for server in servers if server is not victim)
        owned = store.owned_by(victim)
        at = time.monotonic()
        if draw.random() < 0.5:
            result.kills += 1
            victim.kill()
            follow(result, other, store, owned, at)
            victim.start().wait()
            continue
        result.stops += 1
        stopped_seconds = draw.uniform(0.5, 9.0)
        victim.signal(signal.SIGSTOP)
        if stopped_seconds > TERM_SECONDS + 3.0:
            follow(result, other, store, owned, at)
        time.sleep(max(0.0, at + stopped_seconds - time.monotonic()))
        victim.signal(signal.SIGCONT)
        victim.wait()


def follow(result: Result, other: Server, store: Store, owned: int, at: float) -> None:
    """Wait until the other process owns all runs and has looked at each; note how long it took."""
    live = "SELECT count(*) FROM run WHERE status NOT IN ('ended', 'failed')"
    while store.owned_by(other) < store.rows(live)[0][0]:
        if time.monotonic() - at > 6 * MOVES_SECONDS:
            break
        time.sleep(0.05)
    looks = other.count("looks_total")
    while other.count("looks_total") < looks + store.owned_by(other):
        if time.monotonic() - at > 6 * MOVES_SECONDS:
            break
        time.sleep(0.05)
    if owned:
        result.moves += owned
        result.move_seconds.append(round(time.monotonic() - at, 2))


def wait_until_over(store: Store, seconds: float = 90.0) -> bool:
    """Wait until every run has ended and no finding changes any more; return whether it did."""
    deadline, seen, since = time.monotonic() + seconds, None, time.monotonic()
    while time.monotonic() < deadline:
        statuses = {status for (status,) in store.rows("SELECT status FROM run")}
        now = (statuses, store.rows("SELECT count(*), max(id) FROM finding_event"))
        if now != seen:
            seen, since = now, time.monotonic()
        if statuses == {"ended"} and time.monotonic() - since > 6.0:
            return True
        time.sleep(0.2)
    return False


def compare(result: Result, store: Store, quiet: Store, acknowledged: set[tuple[str, int]]) -> None:
    """Compare the store with what was acknowledged, and with that of the undisturbed server."""
    stored = store.rows(
        "SELECT producer.producer, batch.sequence FROM batch"
        " JOIN producer ON producer.id = batch.producer_id"
    )
    result.lost["batches"] = len(acknowledged - set(stored))
    result.twice["batches"] = len(stored) - len(set(stored))
    here, there = store.content(), quiet.content()
    for name, rows in there.items():
        result.lost[name] = (rows - here[name]).total()
        result.twice[name] = (here[name] - rows).total()
    opened = store.rows("SELECT run_id, attempt, key FROM finding")
    result.twice["findings"] = len(opened) - len(set(opened))
    events = store.rows("SELECT finding_id, event FROM finding_event ORDER BY finding_id, id")
    result.twice["openings and recoveries"] = sum(
        before == after and after[1] in ("opened", "reopened", "recovered")
        for before, after in itertools.pairwise(events)
    )
    mine, theirs = store.findings(is_over=False), quiet.findings(is_over=False)
    result.findings = mine.total()
    result.only_here = sorted(map(str, mine - theirs))
    result.only_undisturbed = sorted(map(str, theirs - mine))
    result.differs["findings"] = len(result.only_here) + len(result.only_undisturbed)
    verdicts = "SELECT run_id, (verdict::json)->>'ranks', (verdict::json)->>'kind' FROM run"
    result.differs["verdicts"] = len(set(store.rows(verdicts)) ^ set(quiet.rows(verdicts)))
    over = store.findings(is_over=True) - quiet.findings(is_over=True)
    result.over_only_here = sorted(f"{key[0]}: {key[2]}" for key in over)


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    server = Postgres("-c", "max_connections=300")
    try:
        yield server.start()
    finally:
        server.close()


def measure(seed: int, events: int, folder: Path) -> Result:
    """Run one round."""
    result, began = Result(seed, events), time.monotonic()
    with postgres_server() as postgres, contextlib.ExitStack() as stack:
        urls = [postgres.create_migrated() for _ in range(2)]
        store, quiet = map(Store, urls)
        *servers, undisturbed = (
            Server(folder / name, url) for name, url in zip("abc", [urls[0], *urls], strict=True)
        )
        for server in (*servers, undisturbed):
            stack.callback(server.start().kill)
        for server in (*servers, undisturbed):
            server.wait()
        nodes = make_batches(seed, seconds=10.0 * events)
        ports = [server.port for server in servers]
        collectors = [Collector(batches, ports, seed + n) for n, batches in enumerate(nodes)]
        others = [Collector(batches, [undisturbed.port], seed) for batches in nodes]
        for collector in (*collectors, *others):
            collector.start()
        disturb(result, servers, store, random.Random(seed))
        for collector in (*collectors, *others):
            collector.pause_seconds = 0.0  # what is left, as fast as it goes
        for collector in (*collectors, *others):
            collector.join()
        result.ended = wait_until_over(store) and wait_until_over(quiet)
        logs = "".join((server.folder / "log").read_text() for server in servers)
        result.refused_writes = logs.count("has another owner now")
        count_sends(result, collectors)
        acknowledged = {one for collector in collectors for one in collector.acknowledged}
        compare(result, store, quiet, acknowledged)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def count_sends(result: Result, collectors: list[Collector]) -> None:
    result.batches = sum(len(collector.acknowledged) for collector in collectors)
    result.sends = sum(collector.sends for collector in collectors)
    result.repeats_without_effect = sum(collector.repeats for collector in collectors)
    statuses = sum((collector.statuses for collector in collectors), Counter[str]())
    result.unanswered = statuses.pop("none", 0)
    result.statuses = dict(statuses)


def run_rounds(
    about: str, results: Path, kind: type[AnyResult],
    measure: Callable[[int, int, Path], AnyResult], show: Callable[[AnyResult], None],
    *, rounds: int, events: int,
) -> int:  # fmt: skip
    """Run what the command line asks for and was not run before; return the exit code."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--events", type=int, default=events, help="kills and stops of a round")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--json", action="store_true", help="one round, as JSON; nothing is kept")
    choices = parser.parse_args()
    before = {} if choices.json else known(choices.results, kind)
    is_wrong = False
    for seed in range(choices.seed, choices.seed + choices.rounds):
        result = before.get((seed, choices.events))
        if result is None:
            with tempfile.TemporaryDirectory(prefix="rankscope-servers-") as folder:
                result = measure(seed, choices.events, Path(folder))
            line = json.dumps(asdict(result) | {"passed": result.passed, "cores": os.cpu_count()})
            if choices.json:
                print(line)
            else:
                with choices.results.open("a") as file:
                    file.write(line + "\n")
        if not choices.json:
            show(result)
        is_wrong |= not result.passed
    return int(is_wrong)


def known(path: Path, kind: type[AnyResult]) -> dict[tuple[int, int], AnyResult]:
    """Return the rounds that were measured before, by seed and size."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [msgspec.json.decode(line, type=dict) for line in lines]
    found = [kind(**{name: row[name] for name in kind.__dataclass_fields__}) for row in rows]
    return {(one.seed, one.events): one for one in found}


def show(result: Result) -> None:
    moves = sorted(result.move_seconds)
    print(f"seed {result.seed}: {result.kills} kills, {result.stops} stops")
    print(f"  {result.batches} batches acknowledged in {result.sends} sends: {result.statuses},"
          f" {result.repeats_without_effect} had been stored before")  # fmt: skip
    if moves:
        print(f"  {result.moves} runs moved; until all were looked at: median"
              f" {moves[len(moves) // 2]} s, longest {moves[-1]} s")  # fmt: skip
    print(f"  {result.refused_writes} writes of a server that was woken were refused")
    print(f"  lost {sum(result.lost.values())}, twice {sum(result.twice.values())}; of"
          f" {result.findings} findings {result.differs['findings']} differ")  # fmt: skip
    if not result.passed:
        parts = {"lost": result.lost, "twice": result.twice, "differs": result.differs}
        wrong = {name: {k: n for k, n in part.items() if n} for name, part in parts.items()}
        print(f"  FAILED {wrong}, came to an end: {result.ended}")


def main() -> int:
    about = (__doc__ or "").splitlines()[0]
    return run_rounds(about, RESULTS, Result, measure, show, rounds=5, events=10)


if __name__ == "__main__":
    sys.exit(main())
