"""Which rank's link is slow, loses packets or carries nothing, by the connections between ranks.

The connections only place what steps or a stuck operation have shown; they are no finding of
their own. Each rule first finds the bad flows, then the one rank that is an end of all of them.
Who explains only a part of the flows that it should is not named, and of two ranks with one bad
flow between them neither, unless the kernel of one end shows that it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.policy import Policy
from rankscope_server.findings.text import (
    bytes_text,
    capital,
    confidence_word,
    percent_text,
    ranks_text,
    seconds_text,
)
from rankscope_server.observe.connection_table import NUM_STRETCHES, STRETCH_SECONDS, Flow

Symptom: TypeAlias = Literal["loses", "slow", "stuck"]
Way: TypeAlias = Literal["sends", "receives", "both"]
Same: TypeAlias = Callable[[int], object]  # what two ranks share that have one link
_KEPT_NS = NUM_STRETCHES * STRETCH_SECONDS * 10**9
_STRETCH_NS = STRETCH_SECONDS * 10**9
_MAX_SHOWN = 6
_OF_RANKS: dict[Symptom, dict[Way, str]] = {
    "loses": {
        "receives": "Packets that are sent to {who} get lost",
        "sends": "Packets that {who} sends get lost",
        "both": "The link of {who} loses packets",
    },
    "slow": {
        "receives": "What is sent to {who} arrives slowly",
        "sends": "What {who} sends leaves slowly",
        "both": "The link of {who} is slow",
    },
    "stuck": {
        "receives": "Nothing that is sent to {who} arrives any more",
        "sends": "Nothing that {who} sends arrives any more",
        "both": "The link of {who} carries nothing any more",
    },
}
_OF_PAIR: dict[Symptom, str] = {
    "loses": "Packets between {one} and {other} get lost",
    "slow": "The connection from {one} to {other} is slow",
    "stuck": "Nothing gets through between {one} and {other} any more",
}


@dataclass(frozen=True, slots=True)
class LinkLocation:
    """Where it is: one rank, the ranks of one host, or neither end of one pair."""

    symptom: Symptom
    way: Way
    ranks: tuple[int, ...]  # empty: the pair of `bad`
    bad: tuple[Flow, ...]
    good: tuple[Flow, ...]  # that could show the same and do not
    by: Literal["flows", "sender", "receiver", ""] = "flows"  # what shows which end it is


def slower_link(window: Window, onset_ms: float | None, cost: float) -> LinkLocation | None:
    """Return where transfers became slower since a time; `cost` is their share of throughput."""
    flows = _recent(window, 0.0 if onset_ms is None else onset_ms * 1e6)
    if not flows:
        return None
    policy = window.policy
    earlier = _before(window, onset_ms)
    lossy, could_lose = lossy_flows(flows, earlier, cost, policy)
    if lossy:
        return culprit(window, "loses", lossy, could_lose)
    slow, could_be_slow = slow_flows(flows, earlier, cost, policy)
    return culprit(window, "slow", slow, could_be_slow) if slow else None


def reaches_back(window: Window, onset_ms: float | None) -> bool:
    """Return whether it is still known how the connections were at a time."""
    newest = window.samples.connections.newest_ns
    before_ns = window.policy.connection_before_seconds * 1e9
    return onset_ms is not None and onset_ms * 1e6 >= newest - _KEPT_NS + before_ns


def stuck_link(window: Window, since_ms: float | None) -> LinkLocation | None:
    """Return whose connections carry nothing although data was sent again and again."""
    flows = _recent(window, 0.0 if since_ms is None else since_ms * 1e6 + _STRETCH_NS, 1)
    needed = window.policy.connection_stuck_seconds
    stuck = [flow for flow in flows if flow.stuck_seconds >= needed]
    moving = [flow for flow in flows if flow.num_bytes > 0 and flow not in stuck]
    return culprit(window, "stuck", stuck, moving) if stuck else None


def _recent(window: Window, since_ns: float, least_seconds: float | None = None) -> list[Flow]:
    """Return the flows since a time, nothing where too much of the job is not sampled."""
    table, policy = window.samples.connections, window.policy
    known = table.ranks & set(range(window.world_size))
    if len(known) < (1 - policy.max_missing_share) * window.world_size:
        return []
    newest = table.newest_ns
    flows = table.flows(max(since_ns, newest - _KEPT_NS), newest)
    needed = policy.connection_seconds if least_seconds is None else least_seconds
    return [flow for flow in flows if flow.seconds >= needed]


def _before(window: Window, onset_ms: float | None) -> list[Flow]:
    """Return the flows of the time just before an onset, nothing where there is none."""
    if onset_ms is None:
        return []
    onset_ns, before_ns = onset_ms * 1e6, window.policy.connection_before_seconds * 1e9
    return window.samples.connections.flows(onset_ns - before_ns, onset_ns)


def lossy_flows(
    flows: Sequence[Flow], earlier: Sequence[Flow], cost: float, policy: Policy
) -> tuple[list[Flow], list[Flow]]:
    """Return the flows that began to lose so much that it hurts, and all that would show it."""
    least, share = policy.connection_min_lost, policy.connection_lost_share
    before = {(flow.sender, flow.receiver): flow.lost / max(flow.sent, 1) for flow in earlier}
    bad = [
        flow
        for flow in flows
        if flow.lost >= max(least, share * flow.sent)
        and flow.lost
        >= policy.connection_lost_multiple
        * before.get((flow.sender, flow.receiver), 0.0)
        * flow.sent
    ]
    if not any(flow.busy_seconds >= policy.connection_busy_share * cost * flow.seconds
               for flow in bad):  # fmt: skip
        return [], []
    usual = float(np.median([flow.lost / flow.sent for flow in bad]))
    return bad, [flow for flow in flows if flow.sent * usual >= 2 * least or flow in bad]


def slow_flows(
    flows: Sequence[Flow], earlier: Sequence[Flow], cost: float, policy: Policy
) -> tuple[list[Flow], list[Flow]]:
    """Return the flows that hold up the steps, slower than others and than they were before.

    A flow that takes a share of the steps is busy for as long. Others alone do not show it: a path
    within a host is faster by design.
    """
    before = {(flow.sender, flow.receiver): flow for flow in earlier}
    bad = []
    for flow in flows:
        if flow.busy_seconds < policy.connection_busy_share * cost * flow.seconds:
            continue
        least = policy.connection_comparable_share * flow.num_bytes
        usual = [other.rate for other in flows if other is not flow and other.num_bytes >= least]
        own = before.get((flow.sender, flow.receiver))
        if own is None or own.rate < policy.connection_slow_ratio * flow.rate:
            continue
        usual.append(own.rate)
        if len(usual) < policy.connection_min_compared:
            continue
        if float(np.median(usual)) >= policy.connection_slow_ratio * flow.rate:
            bad.append(flow)
    if not bad:
        return [], []
    carried = policy.connection_comparable_share * float(
        np.median([flow.num_bytes for flow in bad])
    )
    return bad, [flow for flow in flows if flow.num_bytes >= carried or flow in bad]


def culprit(
    window: Window, symptom: Symptom, bad: Sequence[Flow], could: Sequence[Flow]
) -> LinkLocation | None:
    """Return the one rank, else the one host, else the one pair that all bad flows have."""
    for same in (lambda rank: rank, lambda rank: window.host(rank) or rank):
        location = _end_of_all(window, symptom, bad, could, same)
        if location is not None:
            return location
    if len({frozenset((flow.sender, flow.receiver)) for flow in bad}) > 1:
        return None
    good = tuple(flow for flow in could if flow not in bad)
    ranks, by = _which_end(bad, good, window.policy)
    way: Way = "sends" if by == "sender" else "receives" if by == "receiver" else "both"
    return LinkLocation(symptom, way, ranks, tuple(bad), good, by)


def _end_of_all(
    window: Window, symptom: Symptom, bad: Sequence[Flow], could: Sequence[Flow], same: Same
) -> LinkLocation | None:
    """Return the only end of all bad flows, if most flows over it are bad."""
    pairs = [{same(flow.sender), same(flow.receiver)} for flow in bad]
    common = set.intersection(*pairs)
    if len(common) != 1 or any(len(pair) < 2 for pair in pairs):
        return None  # one pair, where either end would explain it, or not between hosts
    (end,) = common
    if all(same(flow.sender) == end for flow in bad):
        way: Way = "sends"
        over = [flow for flow in could if same(flow.sender) == end]
    elif all(same(flow.receiver) == end for flow in bad):
        way = "receives"
        over = [flow for flow in could if same(flow.receiver) == end]
    else:
        way = "both"
        over = [flow for flow in could if end in {same(flow.sender), same(flow.receiver)}]
    over = [flow for flow in over if same(flow.sender) != same(flow.receiver)]
    if 2 * len(bad) / (len(bad) + len({*over, *bad})) < window.policy.link_min_f1:
        return None
    touched = {rank for flow in bad for rank in (flow.sender, flow.receiver)}
    ranks = tuple(sorted(rank for rank in touched if same(rank) == end))
    if len(ranks) > 1:
        ranks = tuple(sorted(rank for rank in window.ranks if same(rank) == end))
    return LinkLocation(symptom, way, ranks, tuple(bad),
                 tuple(flow for flow in could if flow not in bad))  # fmt: skip


def _which_end(
    bad: Sequence[Flow], good: Sequence[Flow], policy: Policy
) -> tuple[tuple[int, ...], Literal["sender", "receiver", ""]]:
    """Return which end of one pair it is, where the kernel of one end shows so itself.

    Data that waits at the sender while network and receiver would take more is held back there,
    by its adapter, its queue or a limit. What the receiver's kernel threw away, beyond what every
    kernel does, had come over the network.
    """
    if len(bad) != 1:
        return (), ""
    (flow,), sure = bad, policy.connection_sure_share
    if flow.waiting >= policy.connection_min_waits and flow.held >= sure * flow.waiting:
        return (flow.sender,), "sender"
    usual = [other.dropped / max(other.sent, 1) for other in good]
    dropped = flow.dropped - flow.sent * (float(np.median(usual)) if usual else 0.0)
    if flow.lost and dropped >= sure * flow.lost:
        return (flow.receiver,), "receiver"
    return (), ""


def with_location(
    window: Window, finding: Finding, location: LinkLocation, what: str, severity: Severity
) -> Finding:
    """Return a finding about slow or stuck transfers with the place that the connections show.

    `what` is the finding's own, without that the place is not known.
    """
    confidence, reasons = _confidence(location)
    ends = tuple(sorted({rank for flow in location.bad for rank in (flow.sender, flow.receiver)}))
    ranks = location.ranks or ends
    where = ", ".join(window.hosts(ranks)[:4]) or "that host"
    return replace(
        finding,
        severity=severity,
        ranks=location.ranks,
        hosts=window.hosts(ranks),
        what=f"{_what(window, location)}: {what[:1].lower()}{what[1:]}",
        why=f"{finding.why}; {_why(location)}",
        next=f"Look at adapter, cable and switch port of {ranks_text(ranks)} ({where}): speed, "
        "errors, drops, limits; take it out of use if a bandwidth check confirms",
        next_command=f"ip -s -s link; tc -s qdisc; ss -ti  # on {where}",
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: {reasons}",
        evidence=(
            *(Evidence(_flow_text(flow), window.link(flow.sender))
              for flow in location.bad[:_MAX_SHOWN]),
            *finding.evidence,
        ),
        ruled_out=(*finding.ruled_out, *_ruled_out(location)),
        would_be_wrong_if=_disproof(location),
        victims=tuple(rank for rank in finding.victims if rank not in location.ranks),
    )  # fmt: skip


def _what(window: Window, location: LinkLocation) -> str:
    if location.ranks:
        text = _OF_RANKS[location.symptom][location.way].format(who=_who(window, location.ranks))
        return text.replace("ranks", "the ranks", 1) if len(location.ranks) > 1 else text
    flow = location.bad[0]
    one, other = (_who(window, (rank,)) for rank in (flow.sender, flow.receiver))
    return _OF_PAIR[location.symptom].format(one=one, other=other)


def _who(window: Window, ranks: tuple[int, ...]) -> str:
    hosts = window.hosts(ranks)
    return f"{ranks_text(ranks)} ({hosts[0]})" if len(hosts) == 1 else ranks_text(ranks)


def _why(location: LinkLocation) -> str:
    worst = max(location.bad, key=lambda flow: flow.busy_seconds)
    between = f"from rank {worst.sender} to rank {worst.receiver}"
    if location.symptom == "loses":
        others = max((flow.lost / max(flow.sent, 1) for flow in location.good), default=None)
        text = (
            f"{between} {worst.lost:,} of {worst.sent:,} segments were lost "
            f"({percent_text(worst.lost / max(worst.sent, 1))})"
        )
        return text + _beside(location, "" if others is None else f"lose at most {_share(others)}")
    if location.symptom == "stuck":
        text = f"{between} the same data is sent again for {seconds_text(worst.stuck_seconds)}"
        return text + _beside(location, "carry data")
    usual = [flow.rate for flow in location.good]
    median = f"carry {bytes_text(float(np.median(usual)))}/s" if usual else ""
    rate = f"{between} {bytes_text(worst.rate)}/s get through while there is data to send"
    return rate + _beside(location, median)


def _share(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"


def _beside(location: LinkLocation, what: str) -> str:
    """Return how many more bad ways there are, and what the others do."""
    bad = len(location.bad)
    text = f", as on {bad - 1} more of its connections" if bad > 1 else ""
    if location.by == "sender":
        text += "; the data waits at the sender, though network and receiver would take more"
    elif location.by == "receiver":
        text += f"; the kernel there threw away {location.bad[0].dropped:,} that had come"
    good = len(location.good)
    return f"{text}; {good} other connections between ranks {what}" if good and what else text


def _flow_text(flow: Flow) -> str:
    text = (
        f"From rank {flow.sender} to rank {flow.receiver}: {bytes_text(flow.num_bytes)} in "
        f"{seconds_text(flow.seconds)}, busy for {seconds_text(flow.busy_seconds)}, "
        f"{flow.lost:,} of {flow.sent:,} segments lost"
    )
    if flow.stuck_seconds:
        text += f", without an answer for {seconds_text(flow.stuck_seconds)}"
    return text


def _confidence(location: LinkLocation) -> tuple[float, str]:
    if not location.ranks:
        return 0.7, "the connection is measured; which end of it is at fault is not"
    who = capital(ranks_text(location.ranks))
    if location.by == "flows":
        return 0.85, f"{who} alone is an end of all connections that show it"
    return 0.8, "one connection shows it, and the kernel at this end shows that it is here"


def _ruled_out(location: LinkLocation) -> tuple[str, ...]:
    out = []
    if location.good:
        out.append(
            f"The network as a whole: {len(location.good)} other connections between ranks are well"
        )
    if location.symptom == "slow":
        out.append("A rank that takes its data late: time in which the receiver took no more "
                   "is left out")  # fmt: skip
    if location.symptom == "stuck":
        out.append("A rank that does not read: its kernel would still answer")
    return tuple(out)


def _disproof(location: LinkLocation) -> str:
    if location.symptom == "stuck":
        return "Data moves again on these connections while the operation still does not end"
    return "A bandwidth check over the same adapter, from several hosts, reaches what others reach"
