"""Reads a trace of PyTorch's profiler (Kineto, JSON), event by event, in bounded memory.

Times in a trace are microseconds; `baseTimeNanoseconds`, where it is given, is what to add to
them for wall clock (libkineto, output_json.cpp).
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankscope_server.importers.counted import Counted
from rankscope_server.importers.json_events import READ_CHARACTERS, TraceError, events_of

_MAX_HEAD = 64 << 20
_MAX_INTERVALS = 20_000_000  # 320 MB
_GZIP = b"\x1f\x8b"
_BEGIN = re.compile(r'"traceEvents"\s*:\s*\[')
_STEP = re.compile(r"ProfilerStep#(\d+)")
_LAST_NUMBER = re.compile(r"(\d+)\D*$")
_NAMED_NUMBER = re.compile(r"(?:rank|worker)[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_BACKWARD = "autograd::engine::evaluate_function"
_OLD_BACKWARD = re.compile(r"[A-Z]\w*Backward\d*|torch::autograd::\w+")  # before PyTorch 1.9


@dataclass(slots=True)
class Operation:
    """One collective or exchange. Times in microseconds of the trace."""

    name: str
    start_us: float
    duration_us: float
    args: dict[str, Any]
    is_device: bool


@dataclass(slots=True)
class Span:
    """Something that the main thread did. Times in microseconds of the trace."""

    start_us: float
    end_us: float


@dataclass(slots=True)
class RankTrace:
    """What is used of one file. `kernels` and `host_work` hold start, end, start, end ..."""

    rank: int
    head: dict[str, Any]
    steps: list[tuple[int, Span]] = field(default_factory=list)
    data: list[Span] = field(default_factory=list)
    forward: list[Span] = field(default_factory=list)
    backward: list[Span] = field(default_factory=list)
    optimizer: list[Span] = field(default_factory=list)
    loads_itself: bool = False  # its DataLoader has no workers
    operations: list[Operation] = field(default_factory=list)
    kernels: array[float] = field(default_factory=lambda: array("d"))
    host_work: array[float] = field(default_factory=lambda: array("d"))

    @property
    def base_ns(self) -> int:
        """Return what to add to times of the trace for wall clock."""
        return int(self.head.get("baseTimeNanoseconds") or 0)

    @property
    def info(self) -> dict[str, Any]:
        """Return what torch.distributed wrote about itself."""
        found = self.head.get("distributedInfo")
        return found if isinstance(found, dict) else {}

    def join(self, later: RankTrace) -> bool:
        """Take another window of this rank's profile, as a schedule that repeats writes them.

        Returns False, and takes nothing, where both show a step or have other clocks.
        """
        known = {number for number, _ in self.steps}
        if self.base_ns != later.base_ns or any(number in known for number, _ in later.steps):
            return False
        for name in ("data", "forward", "backward", "optimizer"):
            getattr(self, name).extend(getattr(later, name))
        self.loads_itself |= later.loads_itself
        self.kernels.extend(later.kernels)
        self.host_work.extend(later.host_work)
        self.steps = sorted(self.steps + later.steps, key=lambda step: step[1].start_us)
        self.operations = sorted(
            self.operations + later.operations, key=lambda operation: operation.start_us
        )
        return True


def read_trace(path: Path, on_bytes: Callable[[int], None] = lambda size: None) -> RankTrace:
    """Read one file, plain or gzip. `on_bytes` gets what was read of it. Raises TraceError."""
    head: dict[str, Any] = {}
    trace = RankTrace(-1, head)
    reader = _Reader(trace)
    try:
        with path.open("rb") as file:
            for event in _events(Counted(file, on_bytes), head):
                reader.take(event)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: its gzip is damaged or cut short; export it again") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    trace.rank = _rank(path, trace)
    if not trace.steps:
        trace.steps = _steps_by_optimizer(trace)
    trace.steps.sort(key=lambda step: step[1].start_us)
    return trace


def _events(raw: Counted, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events; `head` gets what is before and after them."""
    packed = io.BufferedReader(raw, 1 << 20)
    plain: Any = gzip.GzipFile(fileobj=packed) if packed.peek(2)[:2] == _GZIP else packed
    text = io.TextIOWrapper(plain, errors="replace")
    buffer = text.read(READ_CHARACTERS)
    while (begin := _BEGIN.search(buffer)) is None:
        more = text.read(READ_CHARACTERS)
        if not more or len(buffer) > _MAX_HEAD:
            raise TraceError("no traceEvents in it; give what export_chrome_trace wrote")
        buffer += more
    head.update(_fields(buffer[: begin.start()].strip().rstrip(",") + "}"))
    rest = yield from events_of(text, buffer, begin.end())
    tail = (rest + text.read(_MAX_HEAD)).strip().lstrip(",")
    for name, value in _fields("{" + tail).items():
        head.setdefault(name, value)


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class _Reader:
    """Sorts events into a trace; what is not used is dropped at once."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace

    def take(self, event: dict[str, Any]) -> None:
        """Take one event."""
        if event.get("ph") != "X":
            return
        try:
            name, category = str(event["name"]), str(event.get("cat", ""))
            start, duration = float(event["ts"]), float(event.get("dur", 0.0))
        except (KeyError, TypeError, ValueError):
            return
        if not (0 <= duration < 1e13 and abs(start) < 1e16):
            return
        raw = event.get("args")
        args = raw if isinstance(raw, dict) else {}
        span = Span(start, start + duration)
        if category.lower() == "kernel":
            self._kernel(name, span, args)
        elif category == "user_annotation":
            self._annotation(name, span, args)
        elif category == "cpu_op":
            self._operator(name, span)
        elif category == "Operator":  # before PyTorch 1.12: annotations are operators too
            self._annotation(name, span, args)
            self._operator(name, span)
            if _OLD_BACKWARD.fullmatch(name):
                self._trace.backward.append(span)

    def _kernel(self, name: str, span: Span, args: dict[str, Any]) -> None:
        if "nccl" not in name.lower():
            self._add(self._trace.kernels, span)
        elif "Collective name" in args:
            self._operation(str(args["Collective name"]), span, args, is_device=True)
        else:  # before PyTorch 2.2
            self._operation(name, span, args, is_device=True)

    def _annotation(self, name: str, span: Span, args: dict[str, Any]) -> None:
        trace = self._trace
        step = _STEP.match(name)
        if step is not None:
            trace.steps.append((int(step[1]), span))
        elif name.startswith("gloo:"):
            self._operation(name.partition(":")[2], span, args, is_device=False)
        elif name.startswith("enumerate(DataLoader)"):
            trace.data.append(span)
            trace.loads_itself |= "_SingleProcessDataLoaderIter" in name
        elif name.startswith("Optimizer.step#"):
            trace.optimizer.append(span)
        elif name in ("DistributedDataParallel.forward", "FullyShardedDataParallel.forward"):
            trace.forward.append(span)

    def _operator(self, name: str, span: Span) -> None:
        if name.startswith(_BACKWARD):
            self._trace.backward.append(span)
        elif name.startswith("aten::"):
            work = self._trace.host_work
            if not work or span.start_us >= work[-1] or span.end_us > work[-1]:
                self._add(work, span)  # what is inside of another one adds nothing

    def _operation(self, name: str, span: Span, args: dict[str, Any], *, is_device: bool) -> None:
        duration = span.end_us - span.start_us
        self._trace.operations.append(Operation(name, span.start_us, duration, args, is_device))

    def _add(self, intervals: array[float], span: Span) -> None:
        if len(intervals) >= 2 * _MAX_INTERVALS:
            raise TraceError(f"more than {_MAX_INTERVALS:,} operations; profile fewer steps")
        intervals.append(span.start_us)
        intervals.append(span.end_us)


def _rank(path: Path, trace: RankTrace) -> int:
    """Return the rank: what the trace says, else the file's name.

    There it is the number behind "rank" or "worker", else the last one, which may be a time.
    """
    rank = trace.info.get("rank")
    if isinstance(rank, int) and rank >= 0:
        return rank
    name = path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace")
    number = _NAMED_NUMBER.search(name) or _LAST_NUMBER.search(name)
    if number is None or len(number[1]) > 7:
        raise TraceError(f"{path}: does not say its rank (it ran without torch.distributed); "
                         "call it rank3.json for rank 3")  # fmt: skip
    return int(number[1])


def _steps_by_optimizer(trace: RankTrace) -> list[tuple[int, Span]]:
    """Return steps that end with an optimizer's, for a profile that marks none."""
    ends = sorted(span.end_us for span in trace.optimizer)
    starts = [span.start_us for spans in (trace.data, trace.forward, trace.backward)
              for span in spans]  # fmt: skip
    begin = min([*starts, *(span.start_us for span in trace.optimizer)], default=0.0)
    found = []
    for number, end in enumerate(ends, 1):
        found.append((number, Span(begin, end)))
        begin = end
    return found
