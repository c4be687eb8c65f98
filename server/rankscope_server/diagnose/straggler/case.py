"""What the straggler detector says about a case it has proved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rankscope_server.diagnose.shared.traits import shared_by
from rankscope_server.diagnose.straggler.cause import SlowCause
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.kinds import MORE_WORK
from rankscope_server.findings.policy import POLICY, Policy
from rankscope_server.findings.text import (
    capital,
    ms_text,
    percent_text,
    ranks_text,
    ratio_text,
    seconds_text,
    times_text,
)
from rankscope_server.observe.episodes import Episode
from rankscope_server.observe.rank_cost import Cost, Excess
from rankscope_server.observe.stack_samples import StackDifference

_MAX_RATIOS = 4  # in one sentence


@dataclass(frozen=True, slots=True)
class Recurrence:
    """How often ranks are slow, and what that costs of the time since the first stretch."""

    num_stretches: int
    steps_share: float  # of the steps since then
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Ranks that one cause makes slow, with all that is known of it."""

    kind: Literal["slow_compute", "slow_data"]
    ranks: tuple[int, ...]
    worst_rank: int
    episode: Episode
    columns: slice
    onset_step: int
    onset_ms: float | None = None  # where the table has forgotten it
    is_throughout: bool  # of a recording, from the first step on that was compared
    ended_step: int | None
    seconds: float
    is_lasting: bool  # long enough, in steps and seconds, and slow in nearly all of them
    has_peers: bool
    num_peers: int  # of one of these ranks
    excess: Excess
    ratio: float  # self time / reference of the worst rank; of one alone, of its `excess`
    cost: Cost
    company: Mapping[int, float]  # other ranks that are slow meanwhile, and reference / self time
    severity: Severity
    ratios: Mapping[int, float] = field(default_factory=dict)  # of each of several ranks
    share: float = 1.0  # its part of what it and its company cost together
    cost_text: str = ""  # how the cost was found
    cause: SlowCause | None = None  # what a second signal proves
    recurrence: Recurrence | None = None  # the other fields are of the newest stretch
    # a healthy rank, and where this one is and it is not, by stacks of both
    apart: tuple[int, StackDifference] | None = None

    @property
    def whole_cost(self) -> float:
        """Return the share of throughput lost since the onset."""
        return self.cost.ratio if self.recurrence is None else self.recurrence.cost


def name_of(case: Case) -> str:
    """Return by what its finding is known again."""
    return f"{case.kind}/{'+'.join(str(rank) for rank in case.ranks)}"


def finding_of(window: Window, case: Case) -> Finding:
    """Return the finding of a case."""
    confidence, reasons = _confidence(case)
    return window.finding(
        case.cause.kind or case.kind if case.cause else case.kind,
        name_of(case),
        severity=case.severity,
        is_over=case.ended_step is not None,
        ranks=case.ranks,
        onset_step=None if case.is_throughout else case.onset_step,
        onset_ms=None if case.is_throughout else case.onset_ms,
        ended_step=case.ended_step,
        cost=case.whole_cost,
        confidence=(confidence, reasons),
        what=_what(window, case) + _as_well(case),
        why=_why(window, case),
        next=_next(window, case),
        command=_command(window, case),
        evidence=_evidence(window, case),
        ruled_out=_ruled_out(window, case),
        disproof=_disproof(case),
        victims=tuple(sorted(set(window.steps.ranks) - {*case.ranks, *case.company})),
    )


def _reference_text(case: Case) -> str:
    if not case.has_peers:
        return "before"
    num_others = case.num_peers - (len(case.ranks) - 1)
    return f"{num_others:,} peers" if num_others > 1 else "peer"


def _ratios_text(case: Case, policy: Policy = POLICY) -> str:
    """Return by how much they are slower: of each, where that is not about the same."""
    ratios = [case.ratios.get(rank, case.ratio) for rank in case.ranks]
    if len(ratios) > _MAX_RATIOS or max(ratios) <= policy.alike_ratio * min(ratios):
        return ratio_text(case.ratio)
    words = [ratio_text(ratio) for ratio in ratios]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _since(case: Case) -> str:
    again = case.recurrence
    if case.is_throughout and case.ended_step is None:
        return f"in all {case.columns.stop - case.columns.start} steps compared"
    share = "" if again is None else f"in {percent_text(again.steps_share)} of the steps "
    if case.ended_step is None:
        return f"{share}since step {case.onset_step:,}"
    return f"{share}from step {case.onset_step:,} to step {case.ended_step:,}"


def _what(window: Window, case: Case) -> str:
    who = window.who(case.ranks)
    many = len(case.ranks) > 1
    if case.cause is not None and case.cause.kind == MORE_WORK:
        verb, whose = ("were", "their") if many else ("was", "its")
        than = f"{whose} {_reference_text(case)}" if case.has_peers else "before"
        more, work = ratio_text(case.cause.work_ratio), case.cause.work
        return f"{who} {verb} given {more} as many {work} as {than} {_since(case)}"
    if case.kind == "slow_compute":
        than = f"their {_reference_text(case)}" if many else f"its {_reference_text(case)}"
        if not case.has_peers:
            than = "before"
        verb = "are" if many else "is"
        if case.ended_step is not None:
            verb = "were" if many else "was"
        return f"{who} {verb} {_ratios_text(case, window.policy)} slower than {than} {_since(case)}"
    verb = ("wait" if many else "waits") if case.ended_step is None else "waited"
    now = ms_text(case.excess.phase_ms["data"])
    then = ms_text(case.excess.phase_reference_ms["data"])
    than = f"its {_reference_text(case)} {then}" if case.has_peers else f"{then} before"
    return f"{who} {verb} {now} a step for data {_since(case)}, {than}"


def _as_well(case: Case) -> str:
    if case.share == 1.0:
        return ""
    return f"; {_others(case)} {'are' if len(case.company) > 1 else 'is'} slow as well"


def _loss_text(window: Window, case: Case) -> str:
    if case.is_throughout:
        return window.loss_text(case.whole_cost, None, case.ended_step)
    return window.loss_text(case.whole_cost, case.onset_step, case.ended_step, case.onset_ms)


def _why(window: Window, case: Case) -> str:
    excess, cost = case.excess, case.cost
    reference = "its own steps before"
    if case.has_peers:
        several = f"the median of {case.num_peers:,} peers"
        reference = several if case.num_peers > 1 else "its peer"
    phase = max(excess.by_phase, key=lambda name: excess.by_phase[name])
    positive = sum(max(value, 0.0) for value in excess.by_phase.values())
    share = percent_text(max(excess.by_phase[phase], 0.0) / positive) if positive else "none"
    where = "waiting for data" if phase == "data" else phase
    text = (
        f"Rank {case.worst_rank} works {ms_text(excess.own_ms)} a step without waiting for others, "
        f"against {ms_text(excess.reference_ms)} ({reference}); {share} of the excess is in {where}"
    )
    text += f"; {case.cause.text}" if case.cause else _cpu_text(window, case)
    shared = shared_by(window, case.ranks)
    if shared:
        text += f". What they alone have in common: {'; '.join(shared)}"
    before = f" ({ms_text(cost.step_before_ms)} before)" if cost.step_before_ms else ""
    without = "it" if case.share == 1.0 else f"it and {_others(case)}"
    text += (
        f". The job's step takes {ms_text(cost.step_now_ms)}{before}, about "
        f"{ms_text(cost.step_now_ms * (1 - cost.ratio / case.share))} without {without}"
    )
    verb = "lost" if case.ended_step is not None or window.has_ended else "lose"
    return (
        f"{text}: {window.world_size} ranks {verb} "
        f"{percent_text(cost.ratio)} of their throughput{_often_text(case)}, "
        + _loss_text(window, case)
        + _share_text(case)
        + (f" ({case.cost_text})" if case.cost_text else "")
        + _slowdown_text(window)
    )


def _often_text(case: Case) -> str:
    again = case.recurrence
    if again is None:
        return ""
    return (
        f" meanwhile, {percent_text(again.cost)} of that of all the time, with what is between "
        f"{again.num_stretches} such stretches"
    )


def _slowdown_text(window: Window) -> str:
    found = window.facts.slowdown
    if found is None:
        return ""
    return (
        f". S = {found.ratio:.3f}: {ms_text(found.step_ms)} a step, against "
        f"{ms_text(found.ideal_ms)} if all ranks did each operation equally fast"
    )


def _share_text(case: Case) -> str:
    if case.share == 1.0:
        return ""
    joint = percent_text(case.cost.ratio / case.share)
    return f" to it, its part of the {joint} that it costs together with {_others(case)}"


def _others(case: Case) -> str:
    return ranks_text(sorted(case.company))


def _cpu_text(window: Window, case: Case) -> str:
    cpu, reference = case.excess.cpu_ms, case.excess.cpu_reference_ms
    if cpu is None or not reference or case.kind != "slow_compute":
        return ""
    if _has_same_cpu(case, window.policy):
        return (
            f"; its CPU time is the same ({ms_text(cpu)} against {ms_text(reference)}), "
            "so it is held up rather than busy"
        )
    return f"; its CPU time is {times_text(cpu / reference)} as long"


def _has_same_cpu(case: Case, policy: Policy) -> bool:
    """Return whether its CPU time is known and hardly longer, beside by how much the step is."""
    excess, cpu, reference = case.excess, case.excess.cpu_ms, case.excess.cpu_reference_ms
    if not cpu or not reference or not excess.reference_ms > 0:
        return False
    more, step_more = cpu / reference - 1.0, excess.total_ms / excess.reference_ms
    is_little = more < (1.0 - policy.min_explained_share) * step_more
    return is_little and cpu <= policy.same_cpu_ratio * reference


def _next(window: Window, case: Case) -> str:
    if case.cause is not None:
        return case.cause.next
    host = window.host(case.worst_rank) or "its host"
    if window.facts.is_recording:
        return _next_of_recording(window, case, host)
    if case.kind == "slow_data":
        return (
            f"Look at what rank {case.worst_rank} reads on {host}: the disk or mount, the number "
            "of loader workers, one slow file or shard"
        )
    code = f"{case.apart[1].where}, where it spends its time, and at " if case.apart else ""
    excess, share = case.excess, window.policy.script_share
    if excess.by_phase["other"] > share * sum(max(v, 0.0) for v in excess.by_phase.values()):
        at = f" ({case.apart[1].where})" if case.apart else ""
        return (
            f"Look at what the script does on rank {case.worst_rank} outside forward, backward and "
            f"optimizer{at}: logging, saving, .item(), sleeping; if it is the same as on the "
            f"others, at {host}: other processes on its cores, throttling"
        )
    live = "" if window.has_ended else " while it runs"
    return (
        f"Look at {code}{host}{live}: clocks and throttling, other processes on the cores "
        f"or the GPU of rank {case.worst_rank}; if nothing shows, run the job without "
        f"{_left_out(window, case, host)}"
    )


def _next_of_recording(window: Window, case: Case, host: str) -> str:
    if case.kind == "slow_data":
        return (
            f"Compare what rank {case.worst_rank} reads with what its peers read: its files, their "
            f"sizes, the disk or mount of {host}"
        )
    return (
        f"Compare rank {case.worst_rank} with its peers: its input, the clocks and throttling of "
        f"its GPU, what else runs on {host}; run the job without {_left_out(window, case, host)}, "
        "or with the agent, which records what it lacks"
    )


def _left_out(window: Window, case: Case, host: str) -> str:
    """Return what a job can leave out: the host, of the only one the rank."""
    hosts = window.hosts(tuple(window.ranks))
    return f"rank {case.worst_rank}" if hosts == (host,) else host


def _command(window: Window, case: Case) -> str:
    if case.cause is not None:
        return case.cause.command
    known = window.ranks.get(case.worst_rank)
    if known is None or not known.pid:
        return ""
    return f"py-spy top --pid {known.pid}" if case.kind == "slow_compute" else "iostat -x 1"


def _evidence(window: Window, case: Case) -> tuple[Evidence, ...]:
    excess = case.excess
    facts = [
        Evidence(
            f"Rank {rank} in step {case.onset_step:,}, "
            + ("the first one compared" if case.is_throughout else "its first slow step"),
            window.link(rank, case.onset_step),
        )
        for rank in case.ranks[:4]
    ]
    rank = case.worst_rank
    if case.apart is not None:
        other, found = case.apart
        facts.append(Evidence(found.text(rank, other), window.link(rank)))
    facts += [
        Evidence(
            f"{capital(name)}: {ms_text(excess.phase_ms[name])} a step, "
            f"reference {ms_text(excess.phase_reference_ms[name])}"
        )
        for name, value in sorted(excess.by_phase.items(), key=lambda item: -item[1])
        if abs(value) > window.policy.evidence_share * excess.own_ms
    ]
    facts.append(
        Evidence(
            f"{percent_text(case.episode.consistent)} of its {case.episode.num_columns} "
            f"steps in {seconds_text(case.seconds)} are slow by at least half of it"
        )
    )
    if case.recurrence is not None:
        facts.append(
            Evidence(
                f"It was so {case.recurrence.num_stretches} times, last from step "
                f"{int(window.steps.steps[case.columns.start]):,} to step "
                f"{int(window.steps.steps[case.columns.stop - 1]):,}"
            )
        )
    if case.company:
        facts.append(Evidence(f"Meanwhile {_others(case)} slower than usual too"))
    return tuple(facts)


def _ruled_out(window: Window, case: Case) -> tuple[str, ...]:
    excess, out = case.excess, []
    small = window.policy.ruled_out_share * max(excess.total_ms, 0.0)
    waits_for_data = max(excess.phase_ms["data"], excess.phase_reference_ms["data"])
    is_known = waits_for_data > 0  # a loader that is not watched takes no time at all
    if case.kind == "slow_compute" and is_known and excess.by_phase["data"] <= small:
        out.append(
            f"Slow data: it waits {ms_text(excess.phase_ms['data'])} a step for data, "
            f"reference {ms_text(excess.phase_reference_ms['data'])}"
        )
    computing = sum(excess.by_phase[name] for name in ("forward", "backward", "optimizer"))
    if case.kind == "slow_data" and computing <= small:
        beyond = "shorter" if computing < 0 else "longer"
        out.append(
            f"Slow compute: forward, backward and optimizer are {ms_text(abs(computing))} a step "
            f"{beyond} than the reference"
        )
    out.append("Waiting for other ranks: all time blocked on peers is left out of its self time")
    if case.kind == "slow_compute" and _has_same_cpu(case, window.policy):
        out.append("More work to do: its CPU time per step is that of its reference")
    return tuple(out)


def _disproof(case: Case) -> str:
    if case.cause is not None and case.cause.would_be_wrong_if:
        return case.cause.would_be_wrong_if
    if case.kind == "slow_data":
        return "The rank is meant to read more or larger samples than the others"
    if case.has_peers:
        return "The rank is meant to do more work than its peers, for example longer sequences"
    return "The rank was given more work at that step on purpose"


def _confidence(case: Case) -> tuple[float, str]:
    """Return 0.55, more for peers, a risen step time, a lasting episode and a second signal."""
    confidence, reasons = 0.55, []
    if case.has_peers:
        confidence += 0.15
        whole = f"{case.num_peers:,} peers" if case.num_peers > 1 else "its peer"
        reasons.append(f"{whole} did the same work meanwhile")
    else:
        reasons.append("compared with its own earlier steps, as it has no peers")
    before = case.cost.step_before_ms
    if before is not None and case.cost.step_now_ms > before * 1.02:
        confidence += 0.15
        reasons.append("the job's step time rose with it")
    if case.severity != "info":
        confidence += 0.10
        reasons.append(f"it holds for {seconds_text(case.seconds)}")
    else:
        reasons.append("it is short or small")
    if case.cause is not None:
        confidence += 0.10
        reasons.append("a second signal besides step times says why")
    return round(min(confidence, 0.95), 2), ", ".join(reasons)
