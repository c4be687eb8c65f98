"""Links as a preflight measured them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.planning.errors import PlanError
from rankscope.planning.machine import BETWEEN_LATENCY_SECONDS, Link

_BYTES_PER_MBIT = 125_000.0


def link_between(answer: Mapping[str, Any], devices: int) -> tuple[Link, str]:
    """Return the slowest pair of nodes as each device's share of it, and how it was found.

    `answer` is what `rankscope preflight --json` prints. A ring is as fast as its slowest link.
    The transfer of a preflight fills the way from node to node, which the devices of a node share.
    Raises PlanError where no pair was measured.
    """
    reports = answer.get("reports")
    if not isinstance(reports, list):
        remedy = "Give the file that `rankscope preflight --json FILE` wrote"
        raise PlanError("links", "this is no answer of a preflight", remedy)
    found: dict[tuple[str, str], float] = {}
    trips: list[float] = []
    for report in reports:
        for peer, edge in report.get("edges", {}).items():
            speed = edge.get("bandwidth")
            if speed:
                best = max(speed["mbit_per_s"], speed.get("again_mbit_per_s", -1.0))
                found[report["node"], peer] = best
            if edge.get("rtt"):
                trips.append(edge["rtt"]["median_ms"])
    if not found:
        remedy = "Run `rankscope preflight --json FILE` on two nodes or more, without --quick"
        raise PlanError("links", "it measured no pair of nodes", remedy)
    (start, end), slowest = min(found.items(), key=lambda pair: pair[1])
    if slowest <= 0:
        raise PlanError("links", f"nothing arrived from {start} at {end}", "Repair that link first")
    latency = max(trips) / 2e3 if trips else BETWEEN_LATENCY_SECONDS
    text = f"slowest of {len(found)} pairs: {start} to {end}, {slowest:,.0f} Mbit/s"
    return Link(slowest * _BYTES_PER_MBIT / devices, latency), text
