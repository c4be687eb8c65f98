"""What is said of a link that the connections between ranks tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rankscope_server.diagnose.shared.flow import Place, Symptom, Way
from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import Evidence, Finding, Severity
from rankscope_server.findings.text import (
    bytes_text,
    capital,
    confidence_word,
    percent_text,
    ranks_text,
    seconds_text,
)
from rankscope_server.observe.connection_table import Flow

_MAX_TOLD = 6
_OF_RANKS: dict[Symptom, dict[Way, str]] = {
    "loses": {
        "receives": "Packets that are sent to {who} get lost",
        "sends": "Packets that {who} sends get lost",
        "both": "The link of {who} loses packets",
    },
    "slow": {
        "receives": "What is sent to {who} arrives slowly",
        "sends": "What {who} sends goes out slowly",
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
    "slow": "The way from {one} to {other} is slow",
    "stuck": "Nothing gets through between {one} and {other} any more",
}


def at_place(
    window: Window, finding: Finding, place: Place, what: str, severity: Severity
) -> Finding:
    """Return a finding about slow or stuck transfers with the place that the connections tell.

    `what` is the finding's own, without that nobody knows the place.
    """
    confidence, reasons = _confidence(place)
    ends = tuple(sorted({rank for flow in place.bad for rank in (flow.sender, flow.receiver)}))
    ranks = place.ranks or ends
    where = ", ".join(window.hosts(ranks)[:4]) or "that host"
    return replace(
        finding,
        severity=severity,
        ranks=place.ranks,
        hosts=window.hosts(ranks),
        what=f"{_what(window, place)}: {what[:1].lower()}{what[1:]}",
        why=f"{finding.why}; {_why(place)}",
        next=f"Look at adapter, cable and switch port of {ranks_text(ranks)} ({where}): speed, "
        "errors, drops, limits; take it out of use if a bandwidth check confirms",
        next_command=f"ip -s -s link; tc -s qdisc; ss -ti  # on {where}",
        confidence=confidence,
        confidence_text=f"{confidence_word(confidence)}: {reasons}",
        evidence=(
            *(Evidence(_flow_text(flow), window.link(flow.sender))
              for flow in place.bad[:_MAX_TOLD]),
            *finding.evidence,
        ),
        ruled_out=(*finding.ruled_out, *_ruled_out(place)),
        would_be_wrong_if=_wrong_if(place),
        victims=tuple(rank for rank in finding.victims if rank not in place.ranks),
    )  # fmt: skip


def _what(window: Window, place: Place) -> str:
    if place.ranks:
        text = _OF_RANKS[place.symptom][place.way].format(who=_who(window, place.ranks))
        return text.replace("ranks", "the ranks", 1) if len(place.ranks) > 1 else text
    flow = place.bad[0]
    one, other = (_who(window, (rank,)) for rank in (flow.sender, flow.receiver))
    return _OF_PAIR[place.symptom].format(one=one, other=other)


def _who(window: Window, ranks: tuple[int, ...]) -> str:
    hosts = window.hosts(ranks)
    return f"{ranks_text(ranks)} ({hosts[0]})" if len(hosts) == 1 else ranks_text(ranks)


def _why(place: Place) -> str:
    worst = max(place.bad, key=lambda flow: flow.busy_seconds)
    between = f"from rank {worst.sender} to rank {worst.receiver}"
    if place.symptom == "loses":
        others = max((flow.lost / max(flow.sent, 1) for flow in place.good), default=None)
        text = (
            f"{between} {worst.lost:,} of {worst.sent:,} segments were lost "
            f"({percent_text(worst.lost / max(worst.sent, 1))})"
        )
        return text + _beside(place, "" if others is None else f"lose at most {_share(others)}")
    if place.symptom == "stuck":
        text = f"{between} the same data is sent again for {seconds_text(worst.stuck_seconds)}"
        return text + _beside(place, "carry data")
    usual = [flow.rate for flow in place.good]
    median = f"carry {bytes_text(float(np.median(usual)))}/s" if usual else ""
    rate = f"{between} {bytes_text(worst.rate)}/s get through while there is data to send"
    return rate + _beside(place, median)


def _share(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"


def _beside(place: Place, what: str) -> str:
    """Return how many more bad ways there are, and what the others do."""
    bad = len(place.bad)
    text = f", as on {bad - 1} more {'way' if bad == 2 else 'ways'} of it" if bad > 1 else ""
    if place.by == "sender":
        text += "; the data waits at the sender, though network and receiver would take more"
    elif place.by == "receiver":
        text += f"; the kernel there threw away {place.bad[0].dropped:,} that had come"
    good = len(place.good)
    return f"{text}; {good} other ways between ranks {what}" if good and what else text


def _flow_text(flow: Flow) -> str:
    text = (
        f"From rank {flow.sender} to rank {flow.receiver}: {bytes_text(flow.num_bytes)} in "
        f"{seconds_text(flow.seconds)}, busy for {seconds_text(flow.busy_seconds)}, "
        f"{flow.lost:,} of {flow.sent:,} segments lost"
    )
    if flow.stuck_seconds:
        text += f", without an answer for {seconds_text(flow.stuck_seconds)}"
    return text


def _confidence(place: Place) -> tuple[float, str]:
    if not place.ranks:
        return 0.7, "the connection is measured; which end of it is at fault is not"
    who = capital(ranks_text(place.ranks))
    if place.by == "flows":
        return 0.85, f"{who} and nobody else is an end of all connections that show it"
    return 0.8, "one connection shows it, and the kernel at this end tells that it is here"


def _ruled_out(place: Place) -> tuple[str, ...]:
    out = []
    if place.good:
        out.append(f"The network as a whole: {len(place.good)} other ways between ranks are well")
    if place.symptom == "slow":
        out.append("A rank that takes its data late: time in which the receiver took no more "
                   "is left out")  # fmt: skip
    if place.symptom == "stuck":
        out.append("A rank that does not read: its kernel would still answer")
    return tuple(out)


def _wrong_if(place: Place) -> str:
    if place.symptom == "stuck":
        return "Data moves again on these connections while the operation still does not end"
    return "A bandwidth check over the same adapter, from several hosts, reaches what others reach"
