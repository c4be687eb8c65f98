"""Why a step is slow, in one sentence with its evidence; or that it is not, or not known.

The step is compared with the median step before the verdict's onset, else with that of the run. A
rank is named for its self time alone, which no clock and no peer's wait is in: where at least
three others of its role worked clearly less in the same step, or where it has no such peers, and
it alone worked longer than it does itself. What all ranks do is said of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rankscope.wire.formulas import SIGMA_PER_MAD
from rankscope_server.api.timeline.schema import Cause, StepAnswer, StepEvidence
from rankscope_server.findings.policy import POLICY
from rankscope_server.findings.statistics import median, middle
from rankscope_server.findings.text import ms_text, place_text, ratio_text
from rankscope_server.text import plural, rank_list

Array = np.ndarray[Any, np.dtype[Any]]
LEAST_STEPS = 5  # to compare with
_LEAST_RATIO = 0.08  # the least entry of the slow-rank detector
_SIGMAS = 4.0
_SIGMAS_IF_ACCUSED = 1.0  # a finding over many steps names the rank already
_SHARE = 0.5  # of the excess that a cause must explain
_NAMED = 4  # ranks; of more it is no matter of single ranks
_VERBS: Mapping[str, tuple[str, str]] = {  # of one rank, of several
    "data": ("waits {0} for its data", "wait {0} for their data"),
    "checkpoint": ("writes a checkpoint for {0}", "write a checkpoint for {0}"),
    "evaluation": ("evaluates for {0}", "evaluate for {0}"),
}
_WORKS = ("works {0}", "work {0}")
_WHERE: Mapping[str, str] = {
    "data": "waiting for data", "checkpoint": "writing a checkpoint", "evaluation": "evaluation",
    "other": "outside of forward and backward", "optimizer": "in the optimizer",
    "forward": "in forward", "backward": "in backward",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The steps that one is compared with: ms, by rank where they are arrays of ranks x steps."""

    text: str  # which they are
    step_ms: Array  # of the slowest rank of each
    own_ms: Array
    parts_ms: dict[str, Array]  # by phase, the self time in it
    shared_ms: Array  # by step, the shortest wait of any rank: what a transfer takes
    is_before_finding: bool = False  # one that costs throughput holds in the step

    @property
    def median_ms(self) -> float:
        """Return the median step; NaN for too few of them."""
        known = self.step_ms[~np.isnan(self.step_ms)]
        return float(np.median(known)) if len(known) >= LEAST_STEPS else float("nan")


class SlowCall(NamedTuple):
    """A transfer that took longer than in the steps around."""

    text: str
    more_ms: float  # all of its kind in the step together
    is_exchange: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One step: ms, arrays by rank; NaN not known."""

    step: int
    roles: Sequence[int]
    hosts: Sequence[str]
    step_ms: Array
    own_ms: Array
    blocked_ms: Array
    parts_ms: dict[str, Array]
    waited_ms: Array  # the part of the blocked time in which another rank had not come yet
    reference: Reference
    is_first: bool = False  # of its process
    accused: frozenset[int] = frozenset()  # ranks that findings name which hold in the step
    slow_calls: list[SlowCall] = field(default_factory=list)  # the worst first
    path_text: str = ""


@dataclass(frozen=True, slots=True)
class _Reason:
    cause: Cause
    text: str
    ranks: tuple[int, ...] = ()


def answer_of(facts: Facts) -> StepAnswer:
    """Return the answer."""
    took = _largest(facts.step_ms)
    usual = facts.reference.median_ms
    is_slow = _is_slow(took, facts.reference)
    if np.isnan(took):
        what, reason = f"Nothing is known of step {facts.step:,}", _Reason("unknown", "")
    elif is_slow is None:
        reason = _standing_out(facts)
        what = (
            f"Step {facts.step:,} takes {ms_text(took)}; fewer than {LEAST_STEPS} other steps are "
            "there to say whether that is slow"
        )
    elif is_slow:
        reason = _reason(facts, took - usual)
        what = f"Step {facts.step:,} is slow, {ms_text(took)} instead of {ms_text(usual)}"
    else:
        reason = _standing_out(facts)
        what = _not_slow(facts.step, took, usual)
    if reason.text:
        what += f"{': ' if is_slow else '; '}{reason.text}"
    return StepAnswer(
        what=what, is_slow=is_slow, cause=reason.cause, ranks=list(reason.ranks),
        step_ms=None if np.isnan(took) else took,
        reference_ms=None if np.isnan(usual) else usual, reference_text=facts.reference.text,
        evidence=_evidence(facts, reason, took, usual),
    )  # fmt: skip


def _is_slow(took: float, reference: Reference) -> bool | None:
    """Return whether a step is longer than steps vary, or than those before a finding began."""
    usual = reference.median_ms
    if np.isnan(took) or np.isnan(usual):
        return None
    sigma = 0.0 if reference.is_before_finding else middle(np.abs(reference.step_ms - usual))
    return bool(
        took > usual * (1 + _LEAST_RATIO) and took > usual + _SIGMAS * SIGMA_PER_MAD * sigma
    )


def _not_slow(step: int, took: float, usual: float) -> str:
    if took > usual * (1 + _LEAST_RATIO):
        return (
            f"Step {step:,} takes {ms_text(took)}, {ratio_text(took / usual)} the median step; "
            "steps of this run vary by as much"
        )
    return f"Step {step:,} is not slow: it takes {ms_text(took)}, the median step {ms_text(usual)}"


# --- what explains it ------------------------------------------------------------------------


def _reason(facts: Facts, excess: float) -> _Reason:
    """Return what explains at least half of so much more time."""
    if facts.is_first:
        return _Reason("first_step", "it is the first of its process, start-up work is in it")
    if np.isnan(facts.own_ms).all():
        where = "hosts only enqueue here, and their devices were not measured in this step"
        return _Reason("device", f"why is not known, {where}")
    missing = _missing(facts)
    grown = _grown(facts)
    named = _named(facts, grown, excess)
    if named:
        return named
    growth = middle(grown)
    if growth >= _SHARE * excess:
        return _all_ranks(facts, growth)
    if len(set(facts.roles)) > 1:  # of a pipeline: all may wait for a transfer between two
        slow = next((one for one in facts.slow_calls if one.is_exchange), None)
        if slow is not None and slow.more_ms >= _SHARE * excess:
            return _Reason("communication", slow.text)
        return _unexplained(missing)
    shared = _shared(facts)
    usual = middle(facts.reference.shared_ms)
    if shared - usual >= _SHARE * excess:
        if missing:
            return _Reason(
                "missing",
                f"the {plural(len(facts.step_ms) - len(missing), 'recorded rank')} wait at least "
                f"{ms_text(shared)} instead of {ms_text(usual)}; nothing is known of "
                f"{rank_list(missing)}, which may be why",
            )
        return _communication(facts, shared, usual)
    return _unexplained(missing)


def _unexplained(missing: list[int]) -> _Reason:
    if missing:
        lost = f"nothing is known of {rank_list(missing)} in it"
        return _Reason("missing", f"what is recorded does not say why, and {lost}")
    return _Reason("unknown", "no rank and no part of it alone explains half of that")


def _named(facts: Facts, grown: Array, excess: float) -> _Reason | None:
    """Return the ranks whose self time explains the excess; None for none, or for many."""
    beyond = _beyond_peers(facts, facts.own_ms)
    past = _beyond_past(facts, grown)
    is_peered = _is_peered(facts.roles)
    enough = grown >= _SHARE * excess
    accused = np.where(is_peered, enough & beyond, enough & past)
    lone = ~is_peered & accused
    if lone.any():  # without peers it must be alone in having grown
        others = [middle(np.delete(grown, rank)) for rank in np.flatnonzero(lone).tolist()]
        quiet = np.array(others) < _SHARE * grown[lone]
        accused[np.flatnonzero(lone)[~quiet]] = False
    ranks = np.flatnonzero(accused)
    ranks = ranks[np.argsort(-grown[ranks])]
    if not len(ranks) or len(ranks) > min(_NAMED, len(grown) // 2 or 1):
        return None
    return _of_ranks(facts, ranks)


def _of_ranks(facts: Facts, ranks: Array) -> _Reason:
    worst = int(ranks[0])
    kind = _largest_part(facts, worst)
    own = facts.parts_ms[kind] if kind in _VERBS else facts.own_ms
    peers = np.setdiff1d(_peers(facts, worst), ranks)
    who = place_text(ranks.tolist(), sorted({facts.hosts[rank] for rank in ranks.tolist()} - {""}))
    verb = _VERBS.get(kind, _WORKS)[len(ranks) > 1].format(ms_text(float(own[worst])))
    if len(peers) and _is_peered(facts.roles)[worst]:
        whose = "its" if len(ranks) == 1 else "their"
        beside = f", {whose} {plural(len(peers), 'peer')} {ms_text(middle(own[peers]))}"
    else:
        others = int((~np.isnan(facts.own_ms)).sum()) - len(ranks)
        beside = f" instead of {ms_text(_usual_of(facts, kind, worst))}"
        beside += f", the {plural(others, 'other rank')} as usual" if others else ""
    where = "" if kind in _VERBS else f", most of the excess {_WHERE[kind]}"
    return _Reason(_cause_of(kind, "rank"), f"{who} {verb}{beside}{where}", tuple(ranks.tolist()))


def _cause_of(kind: str, otherwise: Cause) -> Cause:
    causes: dict[str, Cause] = {
        "data": "data", "checkpoint": "checkpoint", "evaluation": "evaluation",
    }  # fmt: skip
    return causes.get(kind, otherwise)


def _all_ranks(facts: Facts, growth: float) -> _Reason:
    parts = {
        kind: middle(values - _medians(facts.reference.parts_ms[kind], len(values)))
        for kind, values in facts.parts_ms.items()
    }
    kind = max(parts, key=lambda one: np.nan_to_num(parts[one], nan=-1.0))
    now = middle(facts.own_ms)
    known = int((~np.isnan(facts.own_ms)).sum())
    which = "" if known == len(facts.own_ms) else "recorded "
    who = "the only rank works" if len(facts.own_ms) == 1 else f"all {known:,} {which}ranks work"
    return _Reason(
        _cause_of(kind, "all_ranks"),
        f"{who} longer, {ms_text(now)} instead of {ms_text(now - growth)}, most of it "
        f"{_WHERE[kind]}",
    )


def _communication(facts: Facts, shared: float, usual: float) -> _Reason:
    text = f"communication takes {ms_text(shared)} on every rank instead of {ms_text(usual)}"
    if facts.slow_calls:
        text += f", most in {facts.slow_calls[0].text}"
    waited = facts.waited_ms[~np.isnan(facts.waited_ms)]
    if len(waited) and float(waited.max()) < _LEAST_RATIO * shared:
        text += "; no rank comes late"
    return _Reason("communication", text)


def _standing_out(facts: Facts) -> _Reason:
    """Return the rank that holds the others up, where the step is no slower than others are."""
    least = _LEAST_RATIO * _largest(facts.step_ms)
    beyond = _beyond_peers(facts, facts.own_ms)
    ranks = np.flatnonzero(beyond)
    if len(ranks) and len(ranks) <= min(_NAMED, len(beyond) // 2):
        worst = int(ranks[np.argmax(facts.own_ms[ranks])])
        theirs = middle(facts.own_ms[np.setdiff1d(_peers(facts, worst), ranks)])
        waits = middle(np.delete(facts.waited_ms, ranks))
        if theirs > 0 and waits > least:
            kind = _largest_part(facts, worst)
            ratio = float(facts.own_ms[worst]) / theirs
            text = f"works {ratio_text(ratio)} as long as its peers, which wait {ms_text(waits)}"
            if kind in _VERBS:
                part = facts.parts_ms[kind]
                text = _VERBS[kind][0].format(ms_text(float(part[worst])))
                text += f", its peers {ms_text(middle(part[_peers(facts, worst)]))}"
            cause = _cause_of(kind, "rank")
            return _Reason(cause, f"in it {_place(facts, worst)} {text}", (worst,))
    data = facts.parts_ms["data"]
    ranks = np.flatnonzero(_beyond_peers(facts, data))
    if len(ranks) == 1:
        worst = int(ranks[0])
        theirs = middle(data[_peers(facts, worst)])
        if data[worst] - theirs > least:
            text = f"waits {ms_text(data[worst])} for its data, its peers {ms_text(theirs)}"
            return _Reason("data", f"in it {_place(facts, worst)} {text}", (worst,))
    return _Reason("none", "")


def _place(facts: Facts, rank: int) -> str:
    return place_text([rank], [facts.hosts[rank]] if facts.hosts[rank] else [])


# --- arithmetic ------------------------------------------------------------------------------


def _largest(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else float("nan")


def _missing(facts: Facts) -> list[int]:
    found: list[int] = np.flatnonzero(np.isnan(facts.step_ms)).tolist()
    return found


def _shared(facts: Facts) -> float:
    """Return the shortest wait of any rank: no rank that came late is in it."""
    known = facts.blocked_ms[~np.isnan(facts.blocked_ms)]
    return float(known.min()) if len(known) > 1 else 0.0


def _medians(values: Array, height: int) -> Array:
    """Return the median of each rank over the reference, NaN where fewer than five are known."""
    found = np.full(height, np.nan)
    rows = values[:height]
    if rows.size:
        enough = np.sum(~np.isnan(rows), axis=1) >= LEAST_STEPS
        found[: len(rows)] = np.where(enough, median(rows, 1), np.nan)
    return found


def _grown(facts: Facts) -> Array:
    """Return by how much each rank worked longer than it does."""
    grown: Array = facts.own_ms - _medians(facts.reference.own_ms, len(facts.own_ms))
    return grown


def _is_peered(roles: Sequence[int]) -> Array:
    sizes = {role: list(roles).count(role) for role in set(roles)}
    return np.array([sizes[role] >= POLICY.min_role_size for role in roles], bool)


def _peers(facts: Facts, rank: int) -> Array:
    roles = np.asarray(facts.roles)
    same = (roles == roles[rank]) & ~np.isnan(facts.own_ms)
    same[rank] = False
    return np.flatnonzero(same)


def _beyond_peers(facts: Facts, own: Array) -> Array:
    """Return which ranks took longer than the others of their role by more than these differ."""
    roles = np.asarray(facts.roles)
    sigmas = np.full(len(own), _SIGMAS)
    sigmas[[rank for rank in facts.accused if rank < len(own)]] = _SIGMAS_IF_ACCUSED
    found = np.zeros(len(own), bool)
    for role in np.unique(roles).tolist():
        rows = np.flatnonzero((roles == role) & ~np.isnan(own))
        if len(rows) < POLICY.min_role_size:
            continue
        values = own[rows]
        usual = float(np.median(values))
        sigma = SIGMA_PER_MAD * float(np.median(np.abs(values - usual)))
        found[rows] = values > usual + np.maximum(_LEAST_RATIO * usual, sigmas[rows] * sigma)
    return found


def _beyond_past(facts: Facts, grown: Array) -> Array:
    """Return which ranks worked longer than they do by more than they vary."""
    own = facts.reference.own_ms[: len(grown)]
    usual = facts.own_ms - grown
    sigma = np.full(len(grown), np.nan)
    if own.size:
        sigma[: len(own)] = SIGMA_PER_MAD * median(np.abs(own - usual[: len(own), None]), 1)
    found: Array = grown > np.fmax(_LEAST_RATIO * usual, _SIGMAS * sigma)
    return found


def _largest_part(facts: Facts, rank: int) -> str:
    """Return the phase in which a rank's excess is, over its peers or over its own past."""
    peers = _peers(facts, rank) if _is_peered(facts.roles)[rank] else np.zeros(0, np.int64)
    more = {
        kind: float(values[rank])
        - (middle(values[peers]) if len(peers) else _usual_part(facts, kind, rank))
        for kind, values in facts.parts_ms.items()
    }
    return max(more, key=lambda kind: np.nan_to_num(more[kind], nan=-1.0))


def _usual_part(facts: Facts, kind: str, rank: int) -> float:
    return float(_medians(facts.reference.parts_ms[kind], len(facts.own_ms))[rank])


def _usual_of(facts: Facts, kind: str, rank: int) -> float:
    if kind in _VERBS:
        return _usual_part(facts, kind, rank)
    return float(_medians(facts.reference.own_ms, len(facts.own_ms))[rank])


# --- evidence --------------------------------------------------------------------------------


def _evidence(facts: Facts, reason: _Reason, took: float, usual: float) -> list[StepEvidence]:
    found = []
    if not np.isnan(usual):
        count = int((~np.isnan(facts.reference.step_ms)).sum())
        ratio = ratio_text(took / usual) if usual > 0 and not np.isnan(took) else "unknown"
        found.append(
            f"{ms_text(took)} is {ratio} the median of {plural(count, 'step')}: "
            f"{facts.reference.text}"
        )
    for rank in reason.ranks[:_NAMED]:
        found.append(_rank_text(facts, rank))
    waits = facts.waited_ms[~np.isnan(facts.waited_ms)]
    if len(waits) > 1 and waits.max() > 0.01 * np.nan_to_num(took):
        found.append(
            f"Waiting for another rank to come: {ms_text(float(np.median(waits)))} on the median "
            f"rank, {ms_text(float(waits.max()))} on rank {int(np.nanargmax(facts.waited_ms))}"
        )
    found += [f"Slower than usual: {one.text}" for one in facts.slow_calls[:3]]
    if facts.path_text:
        found.append(facts.path_text.removesuffix("."))
    missing = _missing(facts)
    if missing and len(missing) < len(facts.step_ms):
        found.append(f"No record of this step: {rank_list(missing)}")
    return [StepEvidence(text=text) for text in found]


def _rank_text(facts: Facts, rank: int) -> str:
    peers = _peers(facts, rank)
    parts = []
    for kind, values in facts.parts_ms.items():
        if np.isnan(values[rank]) or values[rank] < 0.01 * np.nan_to_num(facts.step_ms[rank]):
            continue
        text = f"{kind} {ms_text(float(values[rank]))}"
        if len(peers):
            text += f" (peers {ms_text(middle(values[peers]))})"
        parts.append(text)
    return f"Rank {rank} itself: {', '.join(parts)}"
