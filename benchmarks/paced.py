"""A job of a thousand ranks at its own pace: what the server uses, and how far it is behind.

    python benchmarks/paced.py                       # 1,024 ranks, 300 collectives/s, 60 s
    python benchmarks/paced.py --seconds 600 --json
    python benchmarks/paced.py --ranks 4096 --per-second 40
    python benchmarks/paced.py --speed 3 --seconds 60     # more than it can take
    python benchmarks/paced.py --share 0.2 --seconds 300  # the same for senders on few cores

128 collectors post once a second, each at its own moment, whatever became of the posts before; a
collector that is behind sends what waits, as one that spools does. Batches of the first windows are
made anew for the later ones, moved in time and step. All batches are made before the job begins and
kept in a file: to make them takes as much CPU as the server does. All detectors are on. Lag is how
long ago the newest batch came that no look of the analysis has seen.

Senders take as much CPU as the server, so on few cores they cannot send three times what it takes.
With `--share` the server is stopped most of the time and runs in so much of it.

Ranks do as they are asked: of a level of thinning they send single collectives of whole steps
alone, from the step on that was asked for, or from where they are when it comes.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import signal
import statistics
import tempfile
import threading
import time
import urllib.request
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
from ingest import PER_STEP, RANKS_PER_NODE, STEP_NS, Job, Server, body_of, events_of
from rows import keep

from rankscope.node.columns import RankEvents, chunks_of
from rankscope.wire import schema, thinning
from rankscope.wire.chunk import Column, by_rank, decode_chunk

SENDERS = 128  # threads, each with a connection as a collector has
HEADERS = {
    "Content-Type": "application/msgpack", "Content-Encoding": "zstd",
    schema.COMMANDS_HEADER: str(schema.COMMANDS_VERSION),
}  # fmt: skip
PERIOD_SECONDS = 0.05  # in which a server runs and is stopped once
PAGE_SECONDS = 5.0  # between two looks at the run's page
BODY_SECONDS = 0.006  # to make one: the job begins when all are sure to be there


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
    unsent_batches: int = 0  # when it was given up: after as long again, and a minute
    backlog_seconds_worst: float = 0.0  # how late a batch was sent
    backlog_seconds_end: float = 0.0
    said_behind_seconds_worst: float = 0.0  # on the run's page
    least_reporting: int | None = None  # ranks, as the page says; from the first one heard of on
    most_silent: int = 0  # ranks that were heard of and are called silent; none of them is
    levels: list[tuple[float, int]] = field(default_factory=list)  # from which second, asked for
    collectives_sent_ratio: float = 0.0  # of those that the ranks called


class Node:
    """What the ranks of a node were asked for, and have not answered yet."""

    def __init__(self, number: int, level: int = 0) -> None:
        self.number = number
        self.levels = [(0, level)] if level else []  # from which step on
        self._waiting: list[schema.Command] = []
        self._known: set[int] = set()

    def take(self, commands: list[schema.Command], step: int) -> None:
        """Take commands while the ranks are at a step."""
        for command in commands:
            if command.kind == "thin" and command.id not in self._known:
                self._known.add(command.id)
                self._waiting.append(command)
                self.levels.append((max(command.at_step, step + 1), command.level))

    def level(self, step: int) -> int:
        """Return the level in force in a step."""
        return ([0] + [level for first, level in self.levels if first <= step])[-1]

    def is_whole(self, steps: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        """Return in which of these steps single collectives are sent."""
        return np.array([not thinning.is_thinned(n, self.level(n)) for n in steps.tolist()], bool)

    def records(self, step: int, now_ns: int) -> list[schema.AnyRecord]:
        """Return answers to what is done by a step, and what ranks say of it."""
        done = [command for command in self._waiting if command.at_step <= step]
        self._waiting = [command for command in self._waiting if command.at_step > step]
        found: list[schema.AnyRecord] = []
        for command in done:
            fields = {
                "level": str(command.level), "every": str(thinning.every(command.level)),
                "from_step": str(command.at_step), "budget_ratio": "0.005", "source": "probe",
                "servers_why": command.asked_by.removeprefix(schema.SHEDDING),
            }  # fmt: skip
            for rank in command.ranks:
                found.append(schema.CommandAnswer(
                    attempt=0, rank=rank, time_ns=now_ns, command=command.id, state="done",
                ))  # fmt: skip
                found.append(schema.Event(
                    attempt=0, rank=rank, time_ns=now_ns, name="thinning_changed",
                    step=command.at_step, fields=fields,
                ))  # fmt: skip
        return found


class Template:
    """What each node sends in each of some windows; moved on for later ones."""

    def __init__(
        self, job: Job, nodes: int, windows: int, per_window: int, start_ns: int, speed: float
    ) -> None:
        self.job, self.per_window, self.start_ns, self.windows = job, per_window, start_ns, windows
        self.speed, self.step_ns = speed, int(STEP_NS / speed)
        self.chunks = [
            [self._chunks_of(node, window) for node in range(nodes)] for window in range(windows)
        ]

    def _chunks_of(self, node: int, window: int) -> list[schema.Chunk]:
        first = window * self.per_window
        step_lo, steps = first // PER_STEP + 1, self.per_window // PER_STEP
        events = []
        for rank in range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE):
            columns = self.job.collectives(rank, first, self.per_window, self.start_ns)
            events.append(events_of("collectives", rank, self._at_speed(columns)))
            columns = self.job.steps(step_lo, steps, self.start_ns)
            events.append(events_of("steps", rank, self._at_speed(columns)))
        return chunks_of(events)

    def _at_speed(self, columns: dict[str, Column]) -> dict[str, Column]:
        """Return columns of a job that does all so many times as fast."""
        time_column = "arrived_ns" if "arrived_ns" in columns else "started_ns"
        for name, values in columns.items():
            if name.endswith("_ns") and self.speed != 1:
                ns, base = np.asarray(values), self.start_ns if name == time_column else 0
                faster = base + ((ns - base) / self.speed).astype(np.int64)
                columns[name] = np.where(ns < 0, ns, faster)
        return columns

    def step(self, window: float) -> int:
        """Return the last step of a window."""
        return int((window + 1) * self.per_window // PER_STEP)

    def body(self, run: str, node: Node, window: int, made_ns: int) -> tuple[bytes, int]:
        """Return the body of a node for a window, and how many collectives are in it."""
        rounds, place = divmod(window, self.windows)
        chunks = self.chunks[place][node.number]
        if rounds or node.levels:
            steps = rounds * self.windows * self.per_window // PER_STEP
            later = [
                moved(events_of(chunk.kind, rank, columns), steps, self.step_ns, node)
                for chunk in chunks
                for rank, columns in by_rank(chunk.rank, decode_chunk(chunk.data))
            ]
            chunks = chunks_of([events for events in later if events is not None])
        step = self.step(window)
        now_ns = self.start_ns + step * self.step_ns
        level = node.level(step)
        own, asked = (level, 0) if len(node.levels) == 1 and not node.levels[0][0] else (0, level)
        records = [
            msgspec.structs.replace(
                state, thinning=level, thinning_wanted=own, thinning_asked=asked
            )
            for state in self.job.states(node.number, step, now_ns)
        ] + node.records(step, now_ns)  # fmt: skip
        if window == 0:
            records = self.job.hello(node.number, self.start_ns) + records
        count = sum(chunk.count for chunk in chunks if chunk.kind == "collectives")
        return body_of(run, node.number, window + 1, records, chunks, made_ns), count


def moved(events: RankEvents, steps: int, step_ns: int, node: Node) -> RankEvents | None:
    """Return events as they would be some steps later; None where all of them are thinned."""
    kind, columns = events.kind, events.columns
    shift_ns = steps * step_ns
    time_column = "arrived_ns" if kind == "collectives" else "started_ns"
    columns["step"] = np.asarray(columns["step"]) + steps
    columns[time_column] = np.asarray(columns[time_column]) + shift_ns
    if kind == "collectives":
        on_node = np.char.startswith(np.array(list(columns["group"])), "node")
        columns["sequence"] = np.asarray(columns["sequence"]) + steps * np.where(on_node, 4, 16)
    if node.levels:
        is_whole = node.is_whole(np.asarray(columns["step"]))
        if kind == "steps":
            columns["flags"] = np.asarray(columns["flags"]) | schema.STEP_THINNED * ~is_whole
        elif not is_whole.any():
            return None
        elif not is_whole.all():
            columns = {
                name: np.asarray(values)[is_whole] if isinstance(values, np.ndarray)
                else np.array(list(values))[is_whole].tolist()
                for name, values in columns.items()
            }  # fmt: skip
    return events_of(kind, events.rank, columns)


class Prepared:
    """The bodies of all windows of all nodes in files, one of each process that made them."""

    def __init__(self, template: Template, folder: Path, options: argparse.Namespace) -> None:
        self._template = template
        nodes, windows = options.ranks // RANKS_PER_NODE, int(options.seconds * options.speed)
        cores = os.cpu_count() or 1
        jobs = [
            (folder / f"bodies-{core}", range(core, windows, cores), nodes, options.level,
             1.0 / options.speed)
            for core in range(cores)
        ]  # fmt: skip
        with ProcessPoolExecutor(cores, get_context("fork"), _take_template, (template,)) as pool:
            made = list(pool.map(_write_bodies, jobs))
        self._files = [path.open("rb") for path, *_ in jobs]
        self._places = {
            key: (file, *place)
            for file, places in zip(self._files, made, strict=True)
            for key, place in places.items()
        }

    def body(self, run: str, node: Node, window: int, made_ns: int) -> tuple[bytes, int]:
        """Return what was made; anew where ranks were asked for less in the meantime."""
        if any(first for first, _ in node.levels):
            return self._template.body(run, node, window, made_ns)
        file, at, length, count = self._places[window, node.number]
        return os.pread(file.fileno(), length, at), count

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


_template: Template | None = None  # of a process that makes bodies


def _take_template(template: Template) -> None:
    global _template
    _template = template


def _write_bodies(
    job: tuple[Path, range, int, int, float],
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Write the bodies of some windows; return where each is, its length and its collectives."""
    path, windows, nodes, level, period = job
    assert _template is not None
    places = {}
    with path.open("wb") as file:
        for window in windows:
            for number in range(nodes):
                due_ns = int((window + number % 97 / 97) * period * 1e9)
                node = Node(number, level)
                body, count = _template.body("paced", node, window, _template.start_ns + due_ns)
                places[window, number] = (file.tell(), len(body), count)
                file.write(body)
    return places


class Collectors:
    """The collectors of some nodes, in one thread."""

    def __init__(self, server: Server, template: Template, bodies: Prepared, nodes: list[int],
                 result: Result, options: argparse.Namespace) -> None:  # fmt: skip
        self.acks_ms: list[float] = []
        self.num_collectives = 0
        self.late_seconds = 0.0  # of the newest batch
        self.errors: list[BaseException] = []
        self._server, self._template, self._bodies = server, template, bodies
        self._result = result
        self._nodes = [Node(number, options.level) for number in nodes]
        self._period = 1.0 / options.speed
        self._num_windows = int(options.seconds * options.speed)
        self._most_seconds = 2 * options.seconds + 60
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        try:
            self._send_all()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            self.errors.append(error)

    def _send_all(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=120)
        began, began_ns = time.monotonic(), self._template.start_ns
        plan = deque(
            sorted(
                (window * self._period + self._period * (node.number % 97) / 97, window, place)
                for window in range(self._num_windows)
                for place, node in enumerate(self._nodes)
            )
        )
        ready: tuple[bytes, int] | None = None
        while plan:
            due, window, place = plan[0]
            node = self._nodes[place]
            ready = ready or self._bodies.body("paced", node, window, began_ns + int(due * 1e9))
            wait = began + due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            self.late_seconds = max(-wait, 0.0)
            if time.monotonic() - began > self._most_seconds:
                self._result.unsent_batches += len(plan)
                return
            self._result.late_batches += wait < -1.0
            sent = time.monotonic()
            clock = {schema.CLOCK_HEADER: str(time.time_ns())}
            connection.request("POST", "/api/v1/ingest", ready[0], HEADERS | clock)
            answer = connection.getresponse()
            data = answer.read()
            if answer.status in (429, 503):
                self._result.deferred += 1
                time.sleep(float(answer.headers.get("Retry-After", "1")))
                continue
            said = json.loads(data)
            if answer.status != 200 or said["refused"]:
                raise RuntimeError(f"{answer.status}: {data[:300]!r}")
            now = self._template.step((time.monotonic() - began) / self._period)
            node.take(msgspec.convert(said["commands"], list[schema.Command]), now)
            self.num_collectives += ready[1]
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
    num_bodies = nodes * int(options.seconds * options.speed)
    most_seconds = 10 + num_bodies * BODY_SECONDS / (os.cpu_count() or 1)
    start_ns = time.time_ns() + int(most_seconds * 1e9)
    template = Template(job, nodes, options.windows, per_window, start_ns, options.speed)
    with tempfile.TemporaryDirectory() as folder:
        bodies = Prepared(template, Path(folder), options)
        server = Server(Path(folder) / "data")
        time.sleep(max(0.0, (start_ns - time.time_ns()) / 1e9))
        running = threading.Event()
        slowing = threading.Thread(target=slow_down, args=(server, options.share, running))
        slowing.start()
        try:
            groups = [list(range(nodes))[n::SENDERS] for n in range(SENDERS)]
            collectors = [
                Collectors(server, template, bodies, group, result, options)
                for group in groups if group
            ]  # fmt: skip
            watch(server, collectors, result)
        finally:
            running.set()
            slowing.join()
            server.stop()
            bodies.close()
    called = options.ranks * per_window * int(options.seconds * options.speed)
    sent = sum(sender.num_collectives for sender in collectors)
    result.collectives_sent_ratio = round(sent / called, 3)
    acks = sorted(ack for sender in collectors for ack in sender.acks_ms)
    result.ack_ms_median = round(statistics.median(acks), 1)
    result.ack_ms_p99 = round(acks[int(len(acks) * 0.99)], 1)
    return result


def slow_down(server: Server, share: float, ends: threading.Event) -> None:
    """Let the server run in a share of the time only, until this ends."""
    while share < 1 and not ends.is_set():
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(PERIOD_SECONDS * (1 - share))
        server.process.send_signal(signal.SIGCONT)
        time.sleep(PERIOD_SECONDS * share)


def watch(server: Server, collectors: list[Collectors], result: Result) -> None:
    """Let the collectors send, and look at the server once a second."""
    for sender in collectors:
        sender.thread.start()
    before, began = server.cpu_seconds(), time.monotonic()
    lags, marks, level, page_due = [], [(began, before)], 0, began + PAGE_SECONDS
    while any(sender.thread.is_alive() for sender in collectors):
        time.sleep(1.0)
        lags.append(server.counter("rankscope_analysis_lag_seconds"))
        asked = int(server.counter("rankscope_shedding_level"))
        if asked != level:
            level = asked
            result.levels.append((round(time.monotonic() - began, 1), level))
        late = [sender.late_seconds for sender in collectors if sender.thread.is_alive()]
        result.backlog_seconds_end = round(max(late, default=0.0), 1)
        result.backlog_seconds_worst = max(result.backlog_seconds_worst, result.backlog_seconds_end)
        if time.monotonic() > page_due:
            page_due = time.monotonic() + PAGE_SECONDS
            read_page(server, result)
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


def read_page(server: Server, result: Result) -> None:
    """Note what the run's page says of the server and of the ranks."""
    url = f"http://127.0.0.1:{server.port}/api/v1/runs/paced"
    with urllib.request.urlopen(url, timeout=60) as reply:
        page = json.load(reply)
    for note in (page["answer"] or {"notes": []})["notes"]:
        behind = re.match(r"The server is behind by (\d+) s", note)
        if behind:
            worst = max(result.said_behind_seconds_worst, float(behind[1]))
            result.said_behind_seconds_worst = worst
    reporting = int(page["coverage"]["reporting"])
    result.most_silent = max(result.most_silent, len(page["coverage"]["silent"]))
    least = result.least_reporting
    result.least_reporting = reporting if least is None else min(least, reporting)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--per-second", type=int, default=300, help="collectives of a rank")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--speed", type=float, default=1.0, help="windows a second")
    parser.add_argument("--level", type=int, default=0, help="of thinning from the first step on")
    parser.add_argument("--share", type=float, default=1.0, help="of the time the server runs in")
    parser.add_argument("--windows", type=int, default=8, help="that are made beforehand")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--keep", action="store_true", help="a line of benchmarks/results/paced.jsonl"
    )
    options = parser.parse_args()
    result = measure(options)
    print(json.dumps(asdict(result), indent=None if options.json else 2))
    if options.keep:
        keep("paced.jsonl", result)


if __name__ == "__main__":
    main()
