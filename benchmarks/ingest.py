"""What ingest costs the server: collectives per CPU second from HTTP to durable storage.

    python benchmarks/ingest.py                          # SQLite, detectors on, chunks of 5,000
    python benchmarks/ingest.py --no-detectors
    python benchmarks/ingest.py --chunk 300 --events 1000000 [--apart]
    python benchmarks/ingest.py --database-url postgresql+psycopg://... --json

A real server process takes batches as collectors of nodes of 8 ranks send them: of each rank so
many collectives (all columns, two groups, sizes and waits as a sharded job has them) and the steps
around them, put into chunks by the collector's own code: one for several ranks where they are few
(`--apart`: one for each rank). Batches are made beforehand. Counted is the CPU time of the server
process alone, from the first batch until every one is acknowledged and, with detectors, every run
is looked at; the database of PostgreSQL is counted beside it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import numpy as np
import psutil
from rows import keep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankscope.node.columns import RankEvents, chunks_of
from rankscope.wire import schema
from rankscope.wire.chunk import Column
from rankscope.wire.zstd import pack
from tests.ports import free_port

RANKS_PER_NODE = 8
PER_STEP = 20  # collectives of a step
STEP_NS = 70_000_000
START_SECONDS = 30.0
_MIB = 1 << 20


@dataclass
class Result:
    """One measurement; medians and spreads are over its rounds."""

    cores: int
    database: str
    detectors: bool
    events_per_chunk: int  # of a rank
    ranks_together: bool  # several ranks in one chunk, where a collector does that
    ranks: int
    events: int
    bytes_sent_per_event: float = 0.0
    bytes_stored_per_event: float = 0.0
    millions_per_cpu_second: list[float] = field(default_factory=list)
    median: float = 0.0
    rss_mib: float = 0.0
    acknowledged_seconds: float = 0.0
    looked_seconds: float = 0.0


# --- what a job sends --------------------------------------------------------------------------


class Job:
    """A sharded data parallel job: 16 gathers and reductions over all ranks, 4 within a node."""

    def __init__(self, num_ranks: int, seed: int = 16) -> None:
        self.num_ranks = num_ranks
        self._random = np.random.default_rng(seed)
        sizes = [4 << 20, 16 << 20, 25 << 20, 1 << 20]
        calls = [("all_gather_into_tensor", "world", sizes[n % 3]) for n in range(8)]
        calls += [("reduce_scatter_tensor", "world", sizes[n % 3]) for n in range(7)]
        calls += [("all_reduce", "world", 8)] + [("all_reduce", "node", sizes[3])] * 4
        self._calls = calls

    def collectives(self, rank: int, first: int, count: int, start_ns: int) -> dict[str, Column]:
        """Return the columns of `count` collectives from number `first` (from 0) on."""
        numbers = np.arange(first, first + count)
        place, step = numbers % PER_STEP, numbers // PER_STEP
        calls = [self._calls[at] for at in place.tolist()]
        size = np.array([call[2] for call in calls])
        on_node = place >= 16
        # calls of one number begin within some hundred microseconds of each other, and end together
        shared = np.random.default_rng((7, first)).lognormal(0.5, 0.5, count)
        late = self._random.exponential(0.2, count)
        arrived = start_ns + step * STEP_NS + place * 3_000_000 + (late * 1e6).astype(np.int64)
        duration = ((1.5 + shared - np.minimum(late, 1.2)) * 1e6).astype(np.int64)
        started = (self._random.uniform(0.02, 0.06, count) * 1e6).astype(np.int64)
        blocked = np.where(place % 4 == 3, duration - 100_000, 0)
        sequence = np.where(on_node, step * 4 + place - 16, step * 16 + place) + 1
        node = rank // RANKS_PER_NODE
        return {
            "arrived_ns": arrived,
            "started_ns": started,
            "duration_ns": duration,
            "device_duration_ns": np.full(count, -1),
            "returned_ns": (self._random.uniform(0.03, 0.2, count) * 1e6).astype(np.int64),
            "blocked_ns": blocked,
            "sequence": sequence,
            "step": step + 1,
            "size_bytes": size,
            "input_bytes": size,
            "output_bytes": size,
            "peer_rank": np.full(count, -1),
            "num_tensors": np.ones(count, np.int64),
            "state": np.full(count, schema.ENDED),
            "flags": np.full(count, schema.FLAG_ASYNC),
            "group": [f"node{node}" if call[1] == "node" else "world" for call in calls],
            "operation": [call[0] for call in calls],
            "dtype": ["bfloat16"] * count,
            "reduce_op": ["sum" if call[0] != "all_gather_into_tensor" else "" for call in calls],
            "call_site": [f"train.py:{100 + at}" for at in place.tolist()],
            "issued_by": ["probe"] * count,
            "ended_by": ["probe"] * count,
        }

    def steps(self, first: int, count: int, start_ns: int) -> dict[str, Column]:
        """Return the columns of `count` steps from number `first` (from 1) on."""
        numbers = np.arange(first, first + count)

        def ms(mean: float) -> Column:
            return (self._random.normal(mean, mean / 50, count) * 1e6).astype(np.int64)

        columns: dict[str, Column] = {
            name: np.zeros(count, np.int64) for name in schema.STEP_COLUMNS
        }
        columns |= {
            "step": numbers, "started_ns": start_ns + (numbers - 1) * STEP_NS,
            "duration_ns": np.full(count, STEP_NS), "data_ns": ms(3), "forward_ns": ms(20),
            "backward_ns": ms(40), "optimizer_ns": ms(4), "other_ns": ms(1),
            "backward_blocked_ns": ms(8), "cpu_ns": ms(60), "process_cpu_ns": ms(66),
            "microbatches": np.ones(count, np.int64),
            "num_collectives": np.full(count, PER_STEP),
        }  # fmt: skip
        return columns

    def hello(self, node: int, now_ns: int) -> list[schema.AnyRecord]:
        """Return what a collector sends first."""
        ranks = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
        records: list[schema.AnyRecord] = [
            schema.RankRegistered(
                attempt=0, time_ns=now_ns, host=f"node-{node}", rank=rank,
                world_size=self.num_ranks,
                local_rank=rank % RANKS_PER_NODE,
                local_world_size=RANKS_PER_NODE, node_rank=node, pid=1000 + rank, backend="gloo",
            )
            for rank in ranks
        ]  # fmt: skip
        for rank in ranks:
            for group, members in (("world", range(self.num_ranks)), (f"node{node}", ranks)):
                records.append(
                    schema.GroupDefined(
                        attempt=0,
                        time_ns=now_ns,
                        rank=rank,
                        group=group,
                        ranks=list(members),
                        backend="gloo",
                    )
                )
        return records

    def states(self, node: int, step: int, now_ns: int) -> list[schema.AnyRecord]:
        """Return where each rank of a node is."""
        ranks = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
        numbers = {"world": step * 16, f"node{node}": step * 4}
        return [
            schema.RankState(
                attempt=0, rank=rank, time_ns=now_ns, step=step, phase="forward",
                phase_since_ns=now_ns, heartbeat_ns=now_ns,
                groups=[
                    schema.GroupState(group=group, issued=number, ended=number)
                    for group, number in numbers.items()
                ],
            )
            for rank in ranks
        ]  # fmt: skip


def events_of(kind: schema.ChunkKind, rank: int, columns: dict[str, Column]) -> RankEvents:
    """Return what a collector has read of a rank."""
    count = len(next(iter(columns.values())))
    return RankEvents(kind, 0, rank, f"node-{rank // RANKS_PER_NODE}", columns, count)


def body_of(
    run: str,
    node: int,
    sequence: int,
    records: list[schema.AnyRecord],
    chunks: list[schema.Chunk],
    made_ns: int = 0,
) -> bytes:
    """Return the body of one request; made now, or at a time before."""
    batch = schema.Batch(
        schema_version=schema.SCHEMA_VERSION, run_id=run, producer=f"node-{node}/1",
        sequence=sequence, host=f"node-{node}", sent_ns=made_ns or time.time_ns(), records=records,
        chunks=chunks,
    )  # fmt: skip
    return pack(schema.encode(batch))


def bodies(
    job: Job,
    run: str,
    num_windows: int,
    events_per_chunk: int,
    start_ns: int,
    *,
    are_together: bool = True,
) -> Iterator[list[bytes]]:
    """Yield the bodies of all nodes, window by window; the first ones hold the registrations."""
    for window in range(num_windows):
        first = window * events_per_chunk
        step_lo, step_hi = first // PER_STEP + 1, (first + events_per_chunk) // PER_STEP
        row = []
        for node in range(job.num_ranks // RANKS_PER_NODE):
            events = []
            for rank in range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE):
                columns = job.collectives(rank, first, events_per_chunk, start_ns)
                events.append(events_of("collectives", rank, columns))
                steps = job.steps(step_lo, step_hi - step_lo + 1, start_ns)
                events.append(events_of("steps", rank, steps))
            if are_together:
                chunks = chunks_of(events)
            else:
                chunks = [chunk for one in events for chunk in chunks_of([one])]
            now_ns = start_ns + step_hi * STEP_NS
            records = job.states(node, step_hi, now_ns)
            if window == 0:
                records = job.hello(node, start_ns) + records
            row.append(body_of(run, node, window + 1, records, chunks))
        yield row


# --- the server --------------------------------------------------------------------------------


class Server:
    """A real server process, and what it has used."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.port = free_port()
        command = [
            sys.executable, "-m", "rankscope_server.cli", "--port", str(self.port),
            "--data-dir", str(folder), "--log-level", "error", *more,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._wait()
        self._psutil = psutil.Process(self.process.pid)

    def cpu_seconds(self) -> float:
        """Return user and system time of the server process."""
        times = self._psutil.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        """Return the memory that is resident."""
        return float(self._psutil.memory_info().rss) / _MIB

    def counter(self, name: str) -> float:
        """Return a number of /metrics."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise KeyError(name)

    def stop(self) -> None:
        """End it as an operator would."""
        self.process.terminate()
        self.process.wait(60)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(
                    f"http://127.0.0.1:{self.port}/api/v1/ready", timeout=5
                ):
                    return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("the server did not start")


def post(connection: http.client.HTTPConnection, body: bytes) -> None:
    """Send one body until it is taken. Raises RuntimeError for any answer but back-pressure."""
    headers = {"Content-Type": "application/msgpack", "Content-Encoding": "zstd"}
    while True:
        connection.request("POST", "/api/v1/ingest", body, headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status in (429, 503):
            time.sleep(float(answer.headers.get("Retry-After", "0.2")))
            continue
        said = json.loads(data)
        if answer.status != 200 or said["refused"]:
            raise RuntimeError(f"{answer.status}: {data[:500]!r}")
        return


def send_all(server: Server, rows: list[list[bytes]], connections: int) -> None:
    """Send the windows one after the other, the nodes of each at once."""
    for row in rows:
        waiting: SimpleQueue[bytes] = SimpleQueue()
        for body in row:
            waiting.put(body)
        errors: list[BaseException] = []

        def work(
            waiting: SimpleQueue[bytes] = waiting, errors: list[BaseException] = errors
        ) -> None:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            try:
                while True:
                    post(connection, waiting.get_nowait())
            except Empty:
                pass
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)
            finally:
                connection.close()

        threads = [threading.Thread(target=work) for _ in range(min(connections, len(row)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def measure(options: argparse.Namespace, result: Result, rows: list[list[bytes]]) -> None:
    """Run one server over all rows, and add what it took to the result."""
    with tempfile.TemporaryDirectory() as folder:
        more = [] if options.detectors else ["--look-seconds", "86400"]
        if options.database_url:
            more += ["--database-url", options.database_url]
        server = Server(Path(folder), *more)
        try:
            send_all(server, rows[:1], options.connections)  # registrations, imports, first use
            time.sleep(2.0)
            before, began = server.cpu_seconds(), time.monotonic()
            send_all(server, rows[1:], options.connections)
            result.acknowledged_seconds = round(time.monotonic() - began, 2)
            while options.detectors and server.counter("rankscope_runs_behind"):
                time.sleep(0.2)
            result.looked_seconds = round(time.monotonic() - began, 2)
            used = server.cpu_seconds() - before
            result.rss_mib = round(server.rss_mib(), 1)
        finally:
            server.stop()
        events = result.events * (len(rows) - 1) // len(rows)
        result.millions_per_cpu_second.append(round(events / used / 1e6, 3))
        database = [path for path in Path(folder).iterdir() if ".db" in path.name]
        stored = sum(path.stat().st_size for path in database)
        result.bytes_stored_per_event = round(stored / result.events, 2)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=5_000, help="collectives in a chunk")
    parser.add_argument("--events", type=int, default=4_000_000)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--apart", action="store_true", help="a chunk for each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-detectors", dest="detectors", action="store_false")
    parser.add_argument("--database-url", default="")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--keep", action="store_true", help="a line of benchmarks/results/ingest.jsonl"
    )
    options = parser.parse_args()
    windows = max(2, options.events // (options.ranks * options.chunk))
    result = Result(
        cores=os.cpu_count() or 0,
        database=options.database_url.partition("+")[0].partition(":")[0] or "sqlite",
        detectors=options.detectors, events_per_chunk=options.chunk,
        ranks_together=not options.apart, ranks=options.ranks,
        events=windows * options.ranks * options.chunk,
    )  # fmt: skip
    for number in range(options.rounds):
        job, start_ns = Job(options.ranks), time.time_ns() - windows * options.chunk // 20 * STEP_NS
        made = bodies(job, f"ingest-{number}", windows, options.chunk, start_ns,
                      are_together=not options.apart)  # fmt: skip
        rows = list(made)
        sent = sum(len(body) for row in rows for body in row)
        result.bytes_sent_per_event = round(sent / result.events, 2)
        measure(options, result, rows)
    result.median = statistics.median(result.millions_per_cpu_second)
    print(json.dumps(asdict(result), indent=None if options.json else 2))
    if options.keep:
        keep("ingest.jsonl", result)


if __name__ == "__main__":
    main()
