"""What every detector looks at: all that is known of one attempt at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, get_args

import numpy as np

from rankscope.wire.backends import is_of_device
from rankscope.wire.formulas import rank_hours_per_day
from rankscope.wire.schema import ErrorRaised, RankEnded, RankRegistered, RankState, Stacks
from rankscope_server.findings.finding import DetectorResult, Evidence, Finding, Level, Severity
from rankscope_server.findings.kinds import COST, kind_named
from rankscope_server.findings.policy import POLICY, Policy
from rankscope_server.findings.severity import severity_of_cost
from rankscope_server.findings.text import capital, confidence_word, hours_text, place_text
from rankscope_server.observe.baseline import RunSummary
from rankscope_server.observe.calls import CallTable
from rankscope_server.observe.clock_table import ClockTable
from rankscope_server.observe.clocks import Clocks
from rankscope_server.observe.declared_work import DeclaredWork
from rankscope_server.observe.facts import Facts
from rankscope_server.observe.line_table import LineTable
from rankscope_server.observe.operation_times import OperationTimes
from rankscope_server.observe.sample_table import SampleTable
from rankscope_server.observe.stack_samples import StackSample
from rankscope_server.observe.step_table import StepTable
from rankscope_server.replay.replay_table import ReplayTable

_OF_PROCESS = " --pid "  # in a command that looks at a process


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One attempt of one run. Times are wall-clock ns of the host that measured them."""

    run_id: str
    attempt: int
    now_ns: int  # of the server; compared with `heard_ns` only
    world_size: int
    ranks: Mapping[int, RankRegistered] = field(default_factory=dict)
    states: Mapping[int, RankState] = field(default_factory=dict)
    heard_ns: Mapping[int, int] = field(default_factory=dict)  # server's clock
    groups: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    ended: Mapping[int, RankEnded] = field(default_factory=dict)
    errors: Sequence[ErrorRaised] = ()  # in order of time
    stacks: Mapping[int, Stacks] = field(default_factory=dict)
    stack_samples: Mapping[int, Sequence[StackSample]] = field(default_factory=dict)  # some newest
    lines: LineTable = field(default_factory=LineTable)
    usual_lines: Set[str] = frozenset()  # keys of `lines` that earlier runs show that ended well
    steps: StepTable = field(default_factory=StepTable)
    device_steps: StepTable = field(default_factory=StepTable)  # some, on the clock of devices
    sure_device_steps: Sequence[int] = ()  # the newest that hide no waiting
    times: OperationTimes = field(default_factory=OperationTimes)
    calls: CallTable = field(default_factory=CallTable)
    clocks: Clocks = field(default_factory=lambda: Clocks((), np.zeros((0, 0))))
    rank_clocks: Mapping[str, ClockTable] = field(default_factory=dict)  # of the ranks of each host
    replays: ReplayTable = field(default_factory=ReplayTable)
    layer_ms: Sequence[float] = ()  # forward and backward of each layer, where reported
    work: DeclaredWork = field(default_factory=DeclaredWork)
    samples: SampleTable = field(default_factory=SampleTable)
    facts: Facts = field(default_factory=Facts)
    before: Mapping[str, Finding] = field(default_factory=dict)  # of the last look, by key;
    # this look's, of detectors that run before
    policy: Policy = POLICY
    earlier: Sequence[RunSummary] = ()  # runs of the same job before this one, oldest first
    past: Sequence[Window] = ()  # earlier attempts of the run, oldest first
    is_newest: bool = True

    def runs_on_device(self, rank: int) -> bool:
        """Return whether a rank only enqueues its collectives, for its device to do them."""
        known = self.ranks.get(rank)
        return known is not None and is_of_device(known.backend)

    def host(self, rank: int) -> str:
        """Return the host of a rank, empty where it is not known."""
        known = self.ranks.get(rank)
        return known.host if known else ""

    def hosts(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the hosts of some ranks, each once."""
        return tuple(dict.fromkeys(host for rank in ranks if (host := self.host(rank))))

    def who(self, ranks: Sequence[int]) -> str:
        """Return "Rank 3 on node-a", as a sentence begins."""
        return capital(place_text(ranks, self.hosts(ranks)))

    def others(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that report steps, without these."""
        return tuple(rank for rank in sorted(self.steps.ranks) if rank not in ranks)

    @property
    def has_ended(self) -> bool:
        """Return whether no process of the attempt is there any more, as far as is known."""
        return len(self.ended) >= max(self.world_size, 1)

    def loss_text(
        self, cost: float, onset_step: int | None, ended_step: int | None = None,
        onset_ms: float | None = None,
    ) -> str:  # fmt: skip
        """Return the rank-hours that a loss is: those lost, or a day while the attempt runs."""
        if onset_ms is None:
            onset_ms = self._onset_ms(onset_step)
        is_over = self.has_ended or self.facts.is_recording
        lost = self._hours_lost(cost, onset_ms, ended_step) if is_over else None
        if lost is not None:
            return f"{hours_text(lost)} in all"
        return f"{hours_text(rank_hours_per_day(self.world_size, cost))} a day"

    def time_ms(self, step: int) -> float | None:
        """Return when a step began, the median over ranks of wall-clock ms; None if not known."""
        steps = self.steps.steps
        at = int(np.searchsorted(steps, step))
        if at >= len(steps) or steps[at] != step:
            return None
        started = self.steps.get("started_ms")[:, at]
        known = started[~np.isnan(started)]
        return float(np.median(known)) if len(known) else None

    def last_step(self, rank: int) -> int:
        """Return the last step that a rank has reported, 0 where none is known."""
        row = self.steps.row_of.get(rank)
        if row is None:
            return 0
        known = ~np.isnan(self.steps.get("duration")[row])
        return int(self.steps.steps[known][-1]) if np.any(known) else 0

    def has_stepped(self, rank: int) -> bool:
        """Return whether a rank that reports states has ended a step."""
        row, step = self.steps.row_of.get(rank), self.states[rank].step
        if row is None:  # its steps are missing, too: as far as the others
            return step > 1 and self.steps.num_steps > 0
        return not bool(np.isnan(self.steps.get("duration")[row]).all())

    def step_at(self, time_ns: int) -> int | None:
        """Return the step that ran at a time of the wall clock; None where none is known."""
        started = self.steps.get("started_ms")
        if not started.size:
            return None
        known = ~np.all(np.isnan(started), axis=0)
        begun = np.nanmin(started[:, known], axis=0)
        at = int(np.searchsorted(begun, time_ns / 1e6, side="right")) - 1
        return int(self.steps.steps[known][at]) if at >= 0 else None

    def link(self, rank: int, step: int | None = None) -> str:
        """Return the dashboard's path to a rank, or to one step of it."""
        return f"runs/{self.run_id}/ranks?sel={rank}" + ("" if step is None else f"@{step}")

    def finding(
        self,
        kind: str,
        name: object = "",
        *,
        what: str, why: str, next: str,
        confidence: tuple[float, str], disproof: str,
        detector: str = "",
        severity: Severity | None = None,
        ranks: Iterable[int] = (),
        hosts: tuple[str, ...] | None = None,
        group: str | None = None,
        onset_step: int | None = None, onset_ms: float | None = None,
        ended_step: int | None = None, is_over: bool = False,
        cost: float | None = None,
        command: str = "",
        evidence: Iterable[Evidence | str] = (),
        ruled_out: Iterable[str] = (),
        victims: Iterable[int] = (),
        levels: Iterable[Level] = (),
    ) -> Finding:  # fmt: skip
        """Return a finding of a registered kind, with what follows from the rest filled in.

        `name` is unique in a detector and the same in every look; `confidence` comes with its
        reason, `disproof` is what would disprove the finding, `cost` a share of the throughput.
        Unless given, detector and severity are the registry's, hosts the ranks', onset its step's.
        """
        known, ranks = kind_named(kind), tuple(ranks)
        detector = detector or known.detectors[0]
        if onset_ms is None:
            onset_ms = self._onset_ms(onset_step)
        return Finding(
            key=f"{self.attempt}/{detector}/{name}".removesuffix("/"),
            detector=detector,
            kind=kind,
            severity=severity or _severity(known.severity, cost or 0.0, self.policy),
            attempt=self.attempt,
            what=what,
            why=why,
            next=next,
            confidence=confidence[0],
            confidence_text=f"{confidence_word(confidence[0])}: {confidence[1]}",
            would_be_wrong_if=disproof,
            policy_hash=self.policy.hash,
            state="recovered" if is_over else "open",
            ranks=ranks,
            hosts=self.hosts(ranks) if hosts is None else hosts,
            group=group,
            onset_step=onset_step,
            onset_ms=onset_ms,
            ended_step=ended_step,
            cost_throughput_ratio=cost,
            cost_rank_hours_per_day=self._rank_hours(cost),
            cost_rank_hours=self._hours_lost(cost, onset_ms, ended_step),
            next_command="" if self.has_ended and _OF_PROCESS in command else command,
            evidence=tuple(Evidence(fact) if isinstance(fact, str) else fact for fact in evidence),
            ruled_out=tuple(ruled_out),
            victims=tuple(victims),
            levels=tuple(levels),
        )

    def _onset_ms(self, step: int | None) -> float | None:
        return None if step is None else self.time_ms(step)

    def _rank_hours(self, cost: float | None) -> float | None:
        return None if cost is None else rank_hours_per_day(self.world_size, cost)

    def _hours_lost(
        self, cost: float | None, onset_ms: float | None, ended_step: int | None
    ) -> float | None:
        """Return the rank-hours lost from the onset, or the first step, up to the newest step."""
        steps = self.steps.steps
        if cost is None or not len(steps):
            return None
        if onset_ms is None and not self.steps.dropped_steps:
            onset_ms = self.time_ms(int(steps[0]))
        end_ms = self.time_ms(int(steps[-1]) if ended_step is None else ended_step)
        if onset_ms is None or end_ms is None:
            return None
        return self.world_size * cost * max(end_ms - onset_ms, 0.0) / 3.6e6


def _severity(rule: str, cost: float, policy: Policy) -> Severity:
    """Return the severity that the registry's rule gives. Raises ValueError for one in words."""
    if rule == COST:
        return severity_of_cost(cost, policy)
    if rule not in get_args(Severity):
        raise ValueError(f"the detector must say how severe it is: {rule}")
    fixed: Severity = rule  # type: ignore[assignment]
    return fixed


class Detector(Protocol):
    """One diagnosis over a window; the class docstring is its help text."""

    name: ClassVar[str]  # the id in the API, the docs and the registry of kinds
    finds: ClassVar[str]  # these three are its row of docs/detectors.md
    needs: ClassVar[str]
    silent: ClassVar[str]  # where it says nothing, or less than a warning

    def look(self, window: Window) -> DetectorResult:
        """Return what is wrong in `window`; touch nothing else."""
