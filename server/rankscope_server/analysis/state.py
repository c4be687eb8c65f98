"""The analysis of one run: takes records and chunks in any order, answers at any moment."""

from __future__ import annotations

import dataclasses
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

from rankscope.wire.chunk import Column
from rankscope.wire.sample_columns import SAMPLE_KINDS
from rankscope.wire.schema import AnyRecord, Chunk, ClockOffset, RankRegistered, RankState
from rankscope_server.analysis.pacing import Pacing
from rankscope_server.analysis.shedding import Load, Wish
from rankscope_server.call_shapes import ShapedCalls
from rankscope_server.diagnose import DETECTORS
from rankscope_server.diagnose.attempt import AttemptState
from rankscope_server.diagnose.shared.gaps import gaps_of
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import DetectorStatus, Finding
from rankscope_server.findings.policy import POLICY
from rankscope_server.observe.baseline import RunSummary
from rankscope_server.observe.last_lines import why_of
from rankscope_server.observe.line_table import LAUNCHER
from rankscope_server.observe.machine_table import MachineTable
from rankscope_server.observe.sample_table import KINDS, SampleTable
from rankscope_server.replay.replay_table import Deferred
from rankscope_server.verdict.answers import Answer, Look, Verdict
from rankscope_server.verdict.cost import Cost, cost_of
from rankscope_server.verdict.coverage import (
    NO_MORE_HEARD,
    Left,
    coverage_of,
    notes_of,
    status_of,
)
from rankscope_server.verdict.grouping import group_findings
from rankscope_server.verdict.recorded import as_of_spans, as_recorded, recorded_notes
from rankscope_server.verdict.verdict import answer_of, verdict_of

_MAX_ATTEMPTS = 32  # the newest are kept; findings of older ones are the store's
_MAX_CHUNKS_REMEMBERED = 200_000
COST_PAUSE_NS = 10 * 10**9  # what a live run cost changes with every step; it is written so often


@dataclasses.dataclass(frozen=True, slots=True)
class ThinningAsked:
    """A level of thinning to ask all ranks for."""

    level: int
    # to keep their budget; as the server is behind, or in time again
    cause: Literal["budget", "behind", "in time"]
    behind_seconds: float = 0.0  # 0: not known


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What a look of an attempt deferred."""

    attempt: int
    what: Deferred


class RunState:
    """What is known of a run. Applying a record or a chunk twice, or late, changes nothing."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.earlier: tuple[RunSummary, ...] = ()  # runs of the same job, from the store
        self.usual_lines: frozenset[str] = frozenset()  # of those of them that ended well
        self._attempts: dict[int, AttemptState] = {}
        self._pacing: dict[int, Pacing] = {}  # by attempt
        self._clock_offsets: dict[str, ClockOffset] = {}
        self._machines, self._samples = MachineTable(), SampleTable()
        self._machine_chunks: OrderedDict[tuple[str, str, int], None] = OrderedDict()
        self._cost: Cost | None = None
        self._cost_ns = 0  # when it was worked out
        self._is_cost_old = False

    def apply_record(self, record: AnyRecord) -> None:
        """Take one record."""
        if isinstance(record, ClockOffset):  # of a host, whatever runs there
            self._clock_offsets[record.host] = record
            for known in self._attempts.values():
                known.apply_record(record)
            return
        attempt = self._attempt(record.attempt)
        if attempt is not None:
            attempt.apply_record(record)

    def apply_chunk(
        self, chunk: Chunk, columns: dict[str, Column], calls: ShapedCalls | None = None
    ) -> None:
        """Take one chunk with its decoded columns. Samples of nodes are those of all attempts."""
        if chunk.kind in SAMPLE_KINDS:
            self._apply_samples(chunk, columns)
            return
        attempt = self._attempt(chunk.attempt)
        if attempt is not None:
            attempt.apply_chunk(chunk, columns, calls)

    def _apply_samples(self, chunk: Chunk, columns: dict[str, Column]) -> None:
        name = (chunk.host, chunk.kind, zlib.crc32(chunk.data) ^ chunk.time_lo_ns)
        if name in self._machine_chunks:
            return
        self._machine_chunks[name] = None
        if len(self._machine_chunks) > _MAX_CHUNKS_REMEMBERED:
            self._machine_chunks.popitem(last=False)
        self._machines.take_chunk(chunk.kind, chunk.host, columns)
        if chunk.kind in KINDS:
            self._samples.add(chunk.host, chunk.kind, columns)

    def look(self, now_ns: int, behind_seconds: float = 0.0, *, defers: bool = False) -> Look:
        """Return what is known at `now_ns`, wall clock of the server.

        `behind_seconds` is how long ago that is, where the server does not keep up. One that
        `defers` leaves what takes a second to who takes `deferred`, and has of that what was known
        before.
        """
        for attempt in self._attempts.values():
            attempt.replays.defers = defers and not _is_over(attempt)
        findings: list[Finding] = []
        for attempt in self._attempts.values():
            attempt.take_waiting()
        has_news = any(attempt.is_news for attempt in self._attempts.values())
        for number in sorted(self._attempts):
            findings += self._look_at(self._attempts[number], now_ns)
        newest = self._newest()
        mine = [f for f in findings if newest is not None and f.attempt == newest.attempt]
        verdict = verdict_of(mine, newest.results if newest is not None else ())
        if verdict is None:
            verdict = self._verdict_before(findings, newest)
        coverage = coverage_of(newest, now_ns, POLICY)
        left = self._left()
        status, status_text = status_of(newest, findings, coverage, left)
        answer = answer_of(newest, verdict, mine, coverage, POLICY, left)
        answer = _with_delay(_with_notes(answer, newest), behind_seconds)
        if status == "silent" and verdict is not None:
            answer = dataclasses.replace(
                answer, text=f"{NO_MORE_HEARD}; before that: {answer.text}"
            )
        return Look(
            findings=findings,
            detectors=_statuses(newest),
            verdict=verdict,
            answer=_with_attempt(answer, newest),
            status=status,
            status_text=status_text,
            coverage=coverage,
            attempt=newest.attempt if newest is not None else 0,
            step=newest.step if newest is not None else 0,
            cost=self._cost_at(now_ns, newest, has_news=has_news),
            places=dict(newest.stages.places) if newest is not None else {},
        )

    def deferred(self) -> list[Work]:
        """Return what the last look deferred, to be made in any thread and handed to `adopt`."""
        return [
            Work(number, what)
            for number, attempt in self._attempts.items()
            for what in attempt.replays.take_deferred()
        ]

    def adopt(self, work: Work, made: object) -> None:
        """Take what was made of what a look deferred: the next one sees it."""
        attempt = self._attempts.get(work.attempt)
        if attempt is not None:
            attempt.replays.adopt(work.what, made)
            attempt.is_news = True

    def give_up(self, work: Work) -> None:
        """Take note that it could not be made."""
        attempt = self._attempts.get(work.attempt)
        if attempt is not None:
            attempt.replays.give_up(work.what)

    def thinning_to_ask(self, wish: Wish | None) -> ThinningAsked | None:
        """Return the level of thinning to ask all ranks for, None where there is nothing to.

        `wish` is what this server needs for its own sake; None: that is not known.
        """
        newest = self._newest()
        if newest is None:
            return None
        return thinning_to_ask(newest.ranks, newest.states, newest.world_size, wish)

    def load(self, *, is_running: bool) -> Load:
        """Return what the ranks of the newest attempt make and leave out."""
        newest = self._newest()
        alive = [] if newest is None else [s for s in newest.states.values() if s.alive]
        if newest is None or not alive:
            return Load()
        return Load(
            newest.steps.calls_per_second() * len(alive) * is_running,
            level=min(state.thinning for state in alive),
            asked=max(state.thinning_asked for state in alive),
        )

    def _attempt(self, number: int) -> AttemptState | None:
        attempt = self._attempts.get(number)
        if attempt is None:
            attempt = self._attempts[number] = AttemptState(
                self.run_id, number, self._machines, self._samples
            )
            for record in self._clock_offsets.values():
                attempt.apply_record(record)
            if len(self._attempts) > _MAX_ATTEMPTS:
                oldest = min(self._attempts)
                del self._attempts[oldest]
                self._pacing.pop(oldest, None)
        return self._attempts.get(number)

    def _newest(self) -> AttemptState | None:
        known = [number for number, attempt in self._attempts.items() if attempt.known_ranks]
        return self._attempts[max(known)] if known else None

    def _left(self) -> Left | None:
        """Return how the command ended, None while it runs or where it is not known."""
        if not self._attempts:
            return None
        newest = self._attempts[max(self._attempts)]
        code = newest.facts.left_code
        return None if code is None else Left(code, why_of(newest.lines.last.newest(LAUNCHER)))

    def _look_at(self, attempt: AttemptState, now_ns: int) -> list[Finding]:
        is_newest = attempt.attempt == max(self._attempts)
        if attempt.is_news or (is_newest and not _is_over(attempt)):
            past = [
                self._attempts[number].window(now_ns)
                for number in sorted(self._attempts)
                if number < attempt.attempt and self._attempts[number].known_ranks
            ]
            window = attempt.window(
                now_ns, past, self.earlier, usual_lines=self.usual_lines, is_newest=is_newest
            )
            attempt.gaps = gaps_of(window)
            self._ask_detectors(attempt, window)
            attempt.is_news = False
        return group_findings(list(attempt.before.values()))

    def _ask_detectors(self, attempt: AttemptState, window: Window) -> None:
        """Let each detector look that is due, and all that follow one that finds something else."""
        pacing = self._pacing.setdefault(attempt.attempt, Pacing())
        is_paced, is_over = attempt.replays.defers, _is_over(attempt)
        known = {result.status.name: result for result in attempt.results}
        attempt.results = []
        has_changed = False
        for detector in DETECTORS:
            result = known.get(detector.name)
            if (
                is_paced
                and result is not None
                and not has_changed
                and not pacing.is_due(detector.name, window.now_ns)
            ):
                attempt.results.append(result)
                continue
            with pacing.measured(detector.name, window.now_ns):
                result = detector.look(window)
            if attempt.facts.is_recording:
                result = as_recorded(result)
            elif attempt.is_of_spans:
                result = as_of_spans(result)
            attempt.results.append(result)
            findings = result.findings
            if not is_over:
                findings = attempt.steadiness.settle(
                    detector.name, attempt.before, findings, window.now_ns, POLICY
                )
            has_changed |= attempt.replace(detector.name, findings)

    def _cost_at(self, now_ns: int, newest: AttemptState | None, *, has_news: bool) -> Cost | None:
        """Return what the run cost, worked out anew once in a while, and when it is over."""
        if newest is None:
            return None
        is_due = now_ns - self._cost_ns >= COST_PAUSE_NS or _is_over(newest)
        self._is_cost_old |= has_news
        if self._is_cost_old and is_due:
            self._is_cost_old = False
            past = [
                self._attempts[number].window(now_ns)
                for number in sorted(self._attempts)
                if number < newest.attempt and self._attempts[number].known_ranks
            ]
            self._cost, self._cost_ns = cost_of(newest.window(now_ns, past)), now_ns
        return self._cost

    def _verdict_before(
        self, findings: list[Finding], newest: AttemptState | None
    ) -> Verdict | None:
        """Return the verdict on the attempt before while the newest has no step yet."""
        if newest is None or newest.steps.num_steps:
            return None
        earlier = [number for number in self._attempts if number < newest.attempt]
        if not earlier:
            return None
        last = self._attempts[max(earlier)]
        return verdict_of([f for f in findings if f.attempt == last.attempt], last.results)


def _is_over(attempt: AttemptState) -> bool:
    return bool(attempt.ends) and len(attempt.ended) >= attempt.world_size


def _statuses(newest: AttemptState | None) -> list[DetectorStatus]:
    if newest is not None:
        return [result.status for result in newest.results]
    return [
        DetectorStatus(
            detector.name,
            str(detector.__doc__),
            "skipped",
            "nothing was heard of a rank",
            "attach the agent: docs/attach.md",
        )
        for detector in DETECTORS
    ]


def _with_notes(answer: Answer, newest: AttemptState | None) -> Answer:
    """Say what is recorded in part: in the coverage, and beside an answer that is no verdict."""
    notes = () if newest is None else (*notes_of(newest), *recorded_notes(newest))
    shown = [] if answer.state == "culprit" else [note for note in notes if note not in answer.text]
    detail = "; ".join(text for text in (answer.detail, *shown) if text)
    return dataclasses.replace(answer, notes=notes, detail=detail)


def _with_delay(answer: Answer, behind_seconds: float) -> Answer:
    """Say that an answer is old, and why."""
    if not behind_seconds:
        return answer
    note = (
        f"The server is behind by {behind_seconds:.0f} s: what ranks sent since is not in this, "
        "and counts as no silence"
    )
    detail = "; ".join(text for text in (note, answer.detail) if text)
    return dataclasses.replace(answer, notes=(note, *answer.notes), detail=detail)


def _with_attempt(answer: Answer, newest: AttemptState | None) -> Answer:
    """Say which attempt an answer is about when it is not the first."""
    if newest is None or newest.attempt == 0 or answer.state == "culprit":
        return answer
    return dataclasses.replace(answer, text=f"{answer.text} (attempt {newest.attempt})")


def thinning_to_ask(
    ranks: Mapping[int, RankRegistered],
    states: Mapping[int, RankState],
    world_size: int,
    wish: Wish | None,
) -> ThinningAsked | None:
    """Return the level that all ranks should take, None where there is nothing to ask.

    What the server needs is asked of any run; in force is the higher one of that and of the
    highest that any of the ranks needs, for which ranks of one node are asked by its collector.
    A run with a rank that does not report is left as it is, since what it needs is not known.
    """
    alive = [state for state in states.values() if state.alive]
    if not alive or len(alive) < world_size:
        return None
    asked = max(state.thinning_asked for state in alive)
    if wish is not None and asked > wish.level:
        return ThinningAsked(wish.level, "in time")
    if wish is not None and any(state.thinning < wish.level for state in alive):
        return ThinningAsked(wish.level, "behind", wish.behind_seconds)
    if len({known.host for known in ranks.values()}) < 2:
        return None
    wanted = max(state.thinning_wanted for state in alive)
    in_force = max(wanted, asked, 0 if wish is None else wish.level)
    if all(state.thinning == in_force for state in alive):
        return None
    return ThinningAsked(wanted, "budget")
