"""A job of a thousand ranks at its own pace: what the server uses, and how far it is behind.

    python benchmarks/paced.py                       # 1,024 ranks, 300 collectives/s, 60 s
    python benchmarks/paced.py --seconds 600 --json
    python benchmarks/paced.py --ranks 4096 --per-second 40
    python benchmarks/paced.py --speed 3 --seconds 60     # more than it can take

128 collectors post once a second, each at its own moment, whatever became of the posts before; a
collector that is behind sends what waits, as one that spools does. Batches of the first windows are
made beforehand and moved in time and step for the later ones. All detectors are on. Lag is how long
ago the newest batch came that no look of the analysis has seen.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from ingest import PER_STEP, RANKS_PER_NODE, STEP_NS, Job, Server, body_of, chunk_of

from rankscope.wire import schema
from rankscope.wire.chunk import decode_chunk, encode_chunk

SENDERS = 8  # threads
HEADERS = {"Content-Type": "application/msgpack", "Content-Encoding": "zstd"}


@dataclass
class Result:
    """One measurement."""

    cores: int
    ranks: int
    collectors: int
    collectives_per_second: int  # of a rank
    seconds: float
    batches: int = 0
    cpu_of_one_core: float = 0.0  # share
    cpu_each_10_s: list[float] = field(default_factory=list)
    ack_ms_median: float = 0.0
    ack_ms_p99: float = 0.0
    lag_seconds_median: float = 0.0
    lag_seconds_worst: float = 0.0
    rss_mib_end: float = 0.0
    rss_mib_most: float = 0.0
    deferred: int = 0  # answers that asked to send later
    late_batches: int = 0  # sent more than a second after their time


class Template:
    """What each node sends in each of some windows; moved on for later ones."""

    def __init__(self, job: Job, nodes: int, windows: int, per_window: int, start_ns: int) -> None:
        self.job, self.per_window, self.start_ns, self.windows = job, per_window, start_ns, windows
        self.chunks = [
            [self._chunks_of(node, window) for node in range(nodes)] for window in range(windows)
        ]

    def _chunks_of(self, node: int, window: int) -> list[schema.Chunk]:
        first = window * self.per_window
        step_lo, steps = first // PER_STEP + 1, self.per_window // PER_STEP
        chunks = []
        for rank in range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE):
            columns = self.job.collectives(rank, first, self.per_window, self.start_ns)
            chunks.append(chunk_of("collectives", rank, columns))
            chunks.append(chunk_of("steps", rank, self.job.steps(step_lo, steps, self.start_ns)))
        return chunks

    def body(self, run: str, node: int, window: int) -> bytes:
        """Return the body of a node for a window."""
        rounds, place = divmod(window, self.windows)
        chunks = self.chunks[place][node]
        if rounds:
            steps = rounds * self.windows * self.per_window // PER_STEP
            chunks = [moved(chunk, steps) for chunk in chunks]
        step = (window + 1) * self.per_window // PER_STEP
        now_ns = self.start_ns + step * STEP_NS
        records = self.job.states(node, step, now_ns)
        if window == 0:
            records = self.job.hello(node, self.start_ns) + records
        return body_of(run, node, window + 1, records, chunks)


def moved(chunk: schema.Chunk, steps: int) -> schema.Chunk:
    """Return a chunk as it would be some steps later."""
    columns = decode_chunk(chunk.data)
    shift_ns = steps * STEP_NS
    time_column = "arrived_ns" if chunk.kind == "collectives" else "started_ns"
    columns["step"] = np.asarray(columns["step"]) + steps
    columns[time_column] = np.asarray(columns[time_column]) + shift_ns
    if chunk.kind == "collectives":
        on_node = np.char.startswith(np.array(list(columns["group"])), "node")
        columns["sequence"] = np.asarray(columns["sequence"]) + steps * np.where(on_node, 4, 16)
    return msgspec.structs.replace(chunk, data=encode_chunk(columns))


class Collectors:
    """The collectors of some nodes, in one thread."""

    def __init__(self, server: Server, template: Template, nodes: list[int], result: Result,
                 options: argparse.Namespace) -> None:  # fmt: skip
        self.acks_ms: list[float] = []
        self.errors: list[BaseException] = []
        self._server, self._template, self._nodes, self._result = server, template, nodes, result
        self._period = 1.0 / options.speed
        self._num_windows = int(options.seconds * options.speed)
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        try:
            self._send_all()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            self.errors.append(error)

    def _send_all(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=120)
        began = time.monotonic()
        offset = {node: self._period * (node % 97) / 97 for node in self._nodes}
        plan = deque(
            sorted(
                (window * self._period + offset[node], window, node)
                for window in range(self._num_windows)
                for node in self._nodes
            )
        )
        ready: bytes | None = None
        while plan:
            due, window, node = plan[0]
            ready = ready or self._template.body("paced", node, window)
            wait = began + due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            self._result.late_batches += wait < -1.0
            sent = time.monotonic()
            connection.request("POST", "/api/v1/ingest", ready, HEADERS)
            answer = connection.getresponse()
            data = answer.read()
            if answer.status in (429, 503):
                self._result.deferred += 1
                time.sleep(float(answer.headers.get("Retry-After", "1")))
                continue
            if answer.status != 200 or json.loads(data)["refused"]:
                raise RuntimeError(f"{answer.status}: {data[:300]!r}")
            self.acks_ms.append((time.monotonic() - sent) * 1e3)
            self._result.batches += 1
            plan.popleft()
            ready = None


def measure(options: argparse.Namespace) -> Result:
    """Run one server beside the collectors."""
    nodes = options.ranks // RANKS_PER_NODE
    result = Result(os.cpu_count() or 0, options.ranks, nodes, options.per_second, options.seconds)
    job = Job(options.ranks)
    per_window = options.per_second // PER_STEP * PER_STEP
    template = Template(job, nodes, options.windows, per_window, time.time_ns())
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        try:
            groups = [list(range(nodes))[n::SENDERS] for n in range(SENDERS)]
            collectors = [Collectors(server, template, g, result, options) for g in groups if g]
            watch(server, collectors, result)
        finally:
            server.stop()
    acks = sorted(ack for sender in collectors for ack in sender.acks_ms)
    result.ack_ms_median = round(statistics.median(acks), 1)
    result.ack_ms_p99 = round(acks[int(len(acks) * 0.99)], 1)
    return result


def watch(server: Server, collectors: list[Collectors], result: Result) -> None:
    """Let the collectors send, and look at the server once a second."""
    for sender in collectors:
        sender.thread.start()
    before, began = server.cpu_seconds(), time.monotonic()
    lags, marks = [], [(began, before)]
    while any(sender.thread.is_alive() for sender in collectors):
        time.sleep(1.0)
        lags.append(server.counter("rankscope_analysis_lag_seconds"))
        result.rss_mib_most = round(max(result.rss_mib_most, server.rss_mib()), 1)
        if time.monotonic() - marks[-1][0] >= 10:
            marks.append((time.monotonic(), server.cpu_seconds()))
    took, used = time.monotonic() - began, server.cpu_seconds() - before
    for sender in collectors:
        if sender.errors:
            raise sender.errors[0]
    result.seconds = round(took, 1)
    result.cpu_of_one_core = round(used / took, 3)
    result.cpu_each_10_s = [
        round((after[1] - first[1]) / (after[0] - first[0]), 2)
        for first, after in itertools.pairwise(marks)
    ]
    result.lag_seconds_median = round(statistics.median(lags), 2)
    result.lag_seconds_worst = round(max(lags), 2)
    result.rss_mib_end = round(server.rss_mib(), 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--per-second", type=int, default=300, help="collectives of a rank")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--speed", type=float, default=1.0, help="windows a second")
    parser.add_argument("--windows", type=int, default=8, help="that are made beforehand")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(asdict(result), indent=None if options.json else 2))


if __name__ == "__main__":
    main()
