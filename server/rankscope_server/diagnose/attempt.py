"""What is known of one attempt: the newest word of every rank, kept whatever order it comes in."""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from rankscope.wire.chunk import RANK, Column, begins_of
from rankscope.wire.schema import (
    SPANS,
    AnyRecord,
    Chunk,
    ClockOffset,
    ErrorRaised,
    GroupDefined,
    LogLine,
    Loss,
    Metrics,
    RankEnded,
    RankRegistered,
    RankState,
    Stacks,
)
from rankscope_server.call_shapes import ShapedCalls, shapes_of
from rankscope_server.diagnose.shared.gaps import Gap
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorResult, Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.statistics import Array
from rankscope_server.findings.steadiness import Steadiness
from rankscope_server.observe.alike import alike
from rankscope_server.observe.baseline import RunSummary
from rankscope_server.observe.calls import CallTable
from rankscope_server.observe.clock_table import ClockTable, synchronising
from rankscope_server.observe.collectives import Collectives, RankCalls, joined, side_by_side
from rankscope_server.observe.declared_work import DeclaredWork
from rankscope_server.observe.device_steps import DeviceSteps
from rankscope_server.observe.facts import Facts
from rankscope_server.observe.latest_states import LatestStates, keep_newest
from rankscope_server.observe.line_table import LineTable
from rankscope_server.observe.machine_table import MachineTable
from rankscope_server.observe.operation_times import OperationTimes
from rankscope_server.observe.rank_steps import stretches
from rankscope_server.observe.sample_table import SampleTable
from rankscope_server.observe.stack_samples import StackSample
from rankscope_server.observe.stage_table import StageTable
from rankscope_server.observe.step_table import StepTable
from rankscope_server.replay.replay_table import ReplayTable

_MAX_ERRORS = 4096  # the earliest are kept: what came first matters
_MAX_CHUNKS_REMEMBERED = 200_000
_MAX_WAITING = 200_000  # events of chunks, some 40 MB
_MAX_ENDS = 1024  # of one rank
_MAX_GROUPS = 65_536
_MAX_LAYERS = 65_536
_MAX_STACKS = 24  # of a rank
_MAX_LOCAL_RANKS = 32  # of a host whose clocks are compared with each other
_LOCAL_STRIDE = 4  # of the operations that are: a clock that is wrong stays so
_MAX_WAITING_OF_HOST = 4_096  # of these
_FEW_HOSTS = 16
LAYER_METRIC = "layer_ms_"  # and the layer's number, from 0: log_metrics(step, layer_ms_0=1.8, ...)


class AttemptState:
    """One attempt of a run. Nothing here depends on the order in which things arrive."""

    def __init__(
        self,
        run_id: str,
        attempt: int,
        machines: MachineTable | None = None,
        samples: SampleTable | None = None,
    ) -> None:
        self.run_id = run_id
        self.attempt = attempt
        self.ranks: dict[int, RankRegistered] = {}
        self._latest = LatestStates()
        self.states = self._latest.by_rank
        self.ends: dict[int, list[RankEnded]] = {}  # a script may run several programs as one rank
        self.groups: dict[tuple[int, str], tuple[int, ...]] = {}
        self.stacks: dict[int, Stacks] = {}
        self.stack_samples: dict[int, deque[StackSample]] = {}
        self.losses: dict[tuple[int, str, str], Loss] = {}
        self.steps = StepTable()
        self.device_steps = DeviceSteps()
        self.times = OperationTimes()
        self.calls = CallTable()
        self.clocks = ClockTable()
        self.rank_clocks: dict[str, ClockTable] = {}  # of the ranks of one host, by host
        self.replays = ReplayTable()
        self.stages = StageTable()
        self.samples = samples or SampleTable()
        self.work = DeclaredWork()
        self.lines = LineTable()
        self.facts = Facts(machines or MachineTable())
        self.heard_ns: dict[int, int] = {}  # server's clock, from look to look
        self.before: dict[str, Finding] = {}
        self.steadiness = Steadiness()
        self.results: list[DetectorResult] = []
        self.gaps: tuple[Gap, ...] = ()  # of the last look
        self.is_news = True  # something came since the last look
        self._layers: dict[int, tuple[int, float]] = {}  # layer -> time of the word, ms
        self._errors: dict[tuple[int, int, str, str], ErrorRaised] = {}
        self._group_ns: dict[tuple[int, str], int] = {}
        self._members: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._chunks: OrderedDict[tuple[int, str, int], None] = OrderedDict()
        # chunks that no table has yet
        self._waiting_steps: list[tuple[int, Mapping[str, Column]]] = []
        self._waiting_calls: list[RankCalls] = []
        self._num_waiting = 0
        self._waiting_timed: list[Collectives] = []  # that clocks of ranks of a host have not yet
        self._seen_ns: dict[int, int] = {}  # host's clock: newest time of anything of a rank
        self._seen_step: dict[int, int] = {}  # the highest that a state or a chunk of steps said
        self._takers = self._takers_by_type()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out when ranks were heard: another process has not heard them since."""
        state = self.__dict__ | {"heard_ns": {}, "results": [], "is_news": True}
        del state["_takers"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._takers = self._takers_by_type()

    def _takers_by_type(self) -> dict[type, Callable[[Any], None]]:
        return {
            RankEnded: self._end,
            GroupDefined: self._group,
            ErrorRaised: self._error,
            LogLine: self.lines.take,
            Loss: self._lose,
            ClockOffset: self.clocks.add_exchange,
            Metrics: self._measure,
        }

    # --- taking ------------------------------------------------------------------------------

    def apply_record(self, record: AnyRecord) -> None:
        """Take one record of this attempt."""
        self.is_news = True
        if isinstance(record, RankRegistered):  # what came before is of the program before
            self.take_waiting()
            self._compare_on_hosts()
        if record.rank >= 0:
            self._seen(record.rank, record.time_ns)
        if isinstance(record, RankRegistered):
            before = self.ranks.get(record.rank)
            keep_newest(self.ranks, record)
            if before is not None and before.pid != record.pid:
                self._latest.begin_again(record.rank)
                since_ns = max(before.time_ns, record.time_ns)
                self.calls.start_again(since_ns)
                self.stages.start_again()
                for table in (self.clocks, *self.rank_clocks.values()):
                    table.start_again(since_ns)
        elif isinstance(record, RankState):
            self._got_to(record.rank, record.step)
            self._latest.take(record)
            self.calls.add_state(record)
        elif isinstance(record, Stacks):
            keep_newest(self.stacks, record)
            kept = self.stack_samples.setdefault(record.rank, deque(maxlen=_MAX_STACKS))
            sample = StackSample.of(record)
            if sample not in kept:
                kept.append(sample)
        else:
            take = self._takers.get(type(record))
            if take is not None:
                take(record)
            self.facts.take(record)

    def apply_chunk(
        self, chunk: Chunk, columns: Mapping[str, Column], calls: ShapedCalls | None = None
    ) -> None:
        """Take one chunk of this attempt, once; of collectives with their calls, where known.

        Of a chunk of several ranks the columns say which.
        """
        if chunk.kind not in ("steps", "collectives") or chunk.rank < 0:
            return
        name = (chunk.rank, chunk.kind, zlib.crc32(chunk.data) ^ chunk.time_lo_ns)
        if name in self._chunks:
            return
        self._chunks[name] = None
        if len(self._chunks) > _MAX_CHUNKS_REMEMBERED:
            self._chunks.popitem(last=False)
        self.is_news = True
        ranks = np.asarray(columns[RANK]) if RANK in columns else None
        self._seen_in(chunk, columns, ranks)
        if chunk.kind == "steps":
            self._waiting_steps.append((chunk.rank, columns))
            self._num_waiting += len(np.asarray(columns["step"]))
        else:
            calls = calls or shapes_of(columns)
            self._waiting_calls.append(
                RankCalls(chunk.rank if ranks is None else ranks, columns, calls, chunk.data)
            )
            self._num_waiting += len(calls.codes)
        if self._num_waiting > _MAX_WAITING:
            self.take_waiting()

    def take_waiting(self) -> None:
        """Give what came in chunks since the last time to all tables, as one."""
        self._num_waiting = 0
        steps, self._waiting_steps = self._waiting_steps, []
        for taken in stretches(steps):
            self.steps.put_all(taken)
            self.facts.sums.add(taken)
        calls, self._waiting_calls = self._waiting_calls, []
        if calls:
            events = side_by_side(calls)
            self.replays.events.add(calls, events)
            self.calls.add(events, alike(calls))
            self._take_collectives(events)

    def _take_collectives(self, events: Collectives) -> None:
        self.times.add(events)
        self.stages.add(events)
        timed = synchronising(events, min(self.clocks.stride_of(events.groups), _LOCAL_STRIDE))
        self.clocks.add(timed, {rank: known.host for rank, known in self.ranks.items()})
        is_kept = (timed["sequence"] & (_LOCAL_STRIDE - 1)) == 0
        self._waiting_timed.append(timed.where(np.flatnonzero(is_kept), tuple(timed.numbers)))
        num_hosts = max(len(self.rank_clocks), 1)
        if sum(map(len, self._waiting_timed)) > _MAX_WAITING_OF_HOST * num_hosts:
            self._compare_on_hosts()

    def _compare_on_hosts(self) -> None:
        """Give what came since the last time to the tables of the hosts' ranks: few look there."""
        waiting, self._waiting_timed = self._waiting_timed, []
        if not waiting:
            return
        hosts = {
            rank: known.host
            for rank, known in self.ranks.items()
            if 1 < known.local_world_size <= _MAX_LOCAL_RANKS
        }
        timed = joined(waiting)
        for host, chosen in _by_host(timed, hosts):
            if host not in self.rank_clocks:
                self.rank_clocks[host] = ClockTable(stride=_LOCAL_STRIDE, host=host)
            self.rank_clocks[host].add(timed, chosen=chosen)

    def _seen_in(self, chunk: Chunk, columns: Mapping[str, Column], ranks: Array | None) -> None:
        """Take note of when a chunk says that its ranks lived; a rank's peers say nothing of it."""
        is_steps = chunk.kind == "steps"
        begins = np.zeros(1, np.int64) if ranks is None else begins_of(ranks)
        if is_steps:
            furthest = np.maximum.reduceat(np.asarray(columns["step"]), begins)
            of = [chunk.rank] if ranks is None else ranks[begins].tolist()
            for rank, step in zip(of, furthest.tolist(), strict=True):
                self._got_to(rank, step)
        if ranks is None:
            self._seen(chunk.rank, chunk.time_hi_ns)
            return
        times = np.asarray(columns["started_ns" if is_steps else "arrived_ns"])
        ends = times + np.maximum(np.asarray(columns["duration_ns"]), 0)
        newest = np.maximum.reduceat(ends, begins)
        for rank, time_ns in zip(ranks[begins].tolist(), newest.tolist(), strict=True):
            self._seen(rank, time_ns)

    def _seen(self, rank: int, time_ns: int) -> None:
        if time_ns > self._seen_ns.get(rank, -1):
            self._seen_ns[rank] = time_ns
            self.heard_ns.pop(rank, None)  # the next look says when

    def _got_to(self, rank: int, step: int) -> None:
        """Take note of how far a rank has come: more is news, also where its clock was set back."""
        if step > self._seen_step.get(rank, 0):
            self._seen_step[rank] = step
            self.heard_ns.pop(rank, None)

    def _end(self, record: RankEnded) -> None:
        """Keep the ends in the order in which they count: a known reason before "lost"."""
        ends = self.ends.setdefault(record.rank, [])
        if record not in ends:
            ends.append(record)
            ends.sort(key=_end_order)
            del ends[_MAX_ENDS:]

    def _group(self, record: GroupDefined) -> None:
        key = (record.rank, record.group)
        if record.time_ns >= self._group_ns.get(key, 0) and len(self.groups) < _MAX_GROUPS:
            self._group_ns[key] = record.time_ns
            ranks = tuple(record.ranks)
            if ranks not in self._members:
                self.steps.know_group(ranks)
            # One tuple for all members: 8,192 of the world's would take half a gigabyte.
            self.groups[key] = self._members.setdefault(ranks, ranks)
            self.calls.define(record.group, len(record.ranks))

    def _error(self, record: ErrorRaised) -> None:
        key = (record.time_ns, record.rank, record.type, record.message)
        self._errors[key] = record
        if len(self._errors) > _MAX_ERRORS:
            del self._errors[max(self._errors)]

    def _lose(self, record: Loss) -> None:
        key = (record.rank, record.source, record.reason)
        known = self.losses.get(key)
        if known is None or record.count > known.count:
            self.losses[key] = record

    def _measure(self, record: Metrics) -> None:
        """Take what devices measured, and what scripts may say: tokens, times of layers."""
        self.device_steps.put(record.rank, record.step, record.values)
        if "tokens" in record.values:
            self.work.add(record.rank, record.step, record.values["tokens"])
        for name, value in record.values.items():
            number = name.removeprefix(LAYER_METRIC)
            if number != name and number.isdecimal() and int(number) < _MAX_LAYERS:
                known = self._layers.get(int(number), (-1, 0.0))
                self._layers[int(number)] = max(known, (record.time_ns, value))

    def replace(self, detector: str, findings: Iterable[Finding]) -> bool:
        """Put what a detector finds now in place of what it found before.

        Those that look after it in the same second know it: one late look reports what many did.
        Returns whether it finds something else, or as something worse or milder.
        """
        gone = {key: old for key, old in self.before.items() if old.detector == detector}
        for key in gone:
            del self.before[key]
        now = {finding.key: finding for finding in findings}
        self.before.update(now)
        return _said_by(gone) != _said_by(now)

    # --- reading -----------------------------------------------------------------------------

    @property
    def is_of_spans(self) -> bool:
        """Return whether all that is known of its ranks are spans, which are sent at their end."""
        ranks = self.ranks.values()
        return (
            bool(ranks)
            and not self.states
            and all(rank.sources.get("steps") == SPANS for rank in ranks)
        )

    @property
    def errors(self) -> list[ErrorRaised]:
        """Return the exceptions in order of time."""
        return [self._errors[key] for key in sorted(self._errors)]

    @property
    def ended(self) -> dict[int, RankEnded]:
        """Return how ranks ended, without ends after which the rank came up again."""
        found = {}
        for rank, ends in self.ends.items():
            known = self.ranks.get(rank)
            came_up_ns = known.time_ns if known is not None else 0
            counts = next((end for end in ends if end.time_ns >= came_up_ns), None)
            if counts is not None:
                found[rank] = counts
        return found

    @property
    def world_size(self) -> int:
        """Return how many ranks the attempt has, as the ranks say; else as many as are known."""
        said = max((known.world_size for known in self.ranks.values()), default=0)
        return said or len(self.known_ranks)

    @property
    def known_ranks(self) -> set[int]:
        """Return the ranks of which anything is known."""
        return set(self.ranks) | set(self.states) | set(self.steps.row_of) | set(self.ends)

    @property
    def step(self) -> int:
        """Return the newest step that any rank works on or has ended.

        Agents number the step to come as soon as one has ended; a script that does something else
        then, or that is over, has not begun it.
        """
        table = self.steps
        done = int(table.steps[-1]) if table.num_steps else 0
        return max([done, *(s.step for s in self.states.values() if not done or _has_begun(s))])

    @property
    def layer_ms(self) -> tuple[float, ...]:
        """Return the time of each layer, nothing where one between is not known."""
        is_whole = len(self._layers) == max(self._layers, default=-1) + 1
        return tuple(self._layers[n][1] for n in sorted(self._layers)) if is_whole else ()

    def seen_ns(self, rank: int) -> int | None:
        """Return the newest time of anything of a rank, on its host's clock."""
        return self._seen_ns.get(rank)

    def window(
        self,
        now_ns: int,
        past: Sequence[Window] = (),
        earlier: Sequence[RunSummary] = (),
        *,
        usual_lines: Set[str] = frozenset(),
        is_newest: bool = True,
    ) -> Window:
        """Return what detectors look at."""
        self.take_waiting()
        if len(self.rank_clocks) <= _FEW_HOSTS or not self.replays.defers:
            self._compare_on_hosts()  # of more hosts some at a time are looked at anyway
        for rank, seen in self._seen_ns.items():
            # Between looks only the server's clock counts; before the first, the host's must do.
            self.heard_ns.setdefault(rank, min(now_ns, seen) if not self.results else now_ns)
        self.stages.renew(
            self.ranks, self.steps, self.replays.events, POLICY, self.facts.versions.servers
        )
        self.device_steps.renew(self.steps, self.replays.events, self.ranks, self.groups)
        return Window(
            run_id=self.run_id,
            attempt=self.attempt,
            now_ns=now_ns,
            world_size=self.world_size,
            ranks=self.stages.said(self.ranks),
            states=self.states,
            heard_ns=self.heard_ns,
            groups=self.groups,
            ended=self.ended,
            errors=self.errors,
            stacks=self.stacks,
            stack_samples=self.stack_samples,
            lines=self.lines,
            usual_lines=usual_lines,
            steps=self.steps,
            device_steps=self.device_steps.table,
            sure_device_steps=tuple(self.device_steps.sure),
            times=self.times,
            calls=self.calls,
            clocks=self.clocks.clocks(
                {rank: known.host for rank, known in self.ranks.items()},
                POLICY.clock_drift_ratio,
            ),
            rank_clocks=self.rank_clocks,
            replays=self.replays,
            layer_ms=self.layer_ms,
            samples=self.samples,
            work=self.work,
            facts=self.facts,
            before=self.before,
            past=past,
            earlier=earlier,
            is_newest=is_newest,
        )


def _by_host(events: Collectives, hosts: Mapping[int, str]) -> Iterator[tuple[str, Array]]:
    """Yield the events of each host; of a rank that is not in `hosts` there are none."""
    numbers: dict[str, int] = {}
    of_host = events.of_ranks(
        lambda rank: numbers.setdefault(hosts[rank], len(numbers)) if rank in hosts else -1,
        np.arange(len(events)),
    )
    order = np.argsort(of_host.astype(np.int16 if len(numbers) < 1 << 15 else np.int64),
                       kind="stable")  # fmt: skip
    begins = np.searchsorted(of_host[order], np.arange(len(numbers) + 1))
    for host, place in numbers.items():
        yield host, order[begins[place] : begins[place + 1]]


def _said_by(findings: Mapping[str, Finding]) -> set[tuple[str, str, str]]:
    return {(key, one.severity, one.state) for key, one in findings.items()}


def _end_order(record: RankEnded) -> tuple[bool, int, str]:
    return record.reason == "lost", record.time_ns, repr(record)


def _has_begun(state: RankState) -> bool:
    return state.phase != "other" or any(group.issued > group.ended for group in state.groups)
