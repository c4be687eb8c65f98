"""The contract of `--once --json`: truth, verdict, whether they match, and how it was recorded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rankscope.demo.processes import Api, Demo
from rankscope.demo.watch import View, Watch
from rankscope.rank.hooks.collectives import SOURCES
from rankscope.wire import thinning

VERDICT_FIELDS = (
    "kind", "ranks", "onset_step", "cost_throughput_ratio", "what", "why", "next",
)  # fmt: skip
_BEST = SOURCES[0].name
_BUDGET = "RANKSCOPE_OVERHEAD_PERCENT"  # what is thinned is said with its remedy


@dataclass(frozen=True)
class Recording:
    """How the collectives of a run were recorded: a sentence each, empty where all is best."""

    source: str = ""  # its name, never empty once a rank has registered
    better: str = ""
    thinned: str = ""


def recording(api: Api, run_id: str) -> Recording:
    """Return what the agents of a run say of their source of collectives."""
    rows = (api.get(f"runs/{run_id}/agent") or {}).get("sources", [])
    used = [row for row in rows if row["hook"] == "collectives"]
    ranks: dict[str, list[int]] = defaultdict(list)
    for row in used:
        ranks[row["source"].partition(":")[0] or f"none, {row['reason']}"] += row["ranks"]
    better = ""
    if set(ranks) - {_BEST}:
        reasons = [row["reason"] for row in rows if row["hook"] == f"collectives/{_BEST}"]
        why = f", but: {reasons[0]}" if reasons else ""
        better = f"{_BEST} costs the ranks least{why}; `rankscope doctor` says more"
    changed = [row["source"].partition(": ")[2] for row in used if _BUDGET in row["source"]]
    thinned = [text for text in changed if not text.startswith(thinning.words(0))]
    return Recording(_by_ranks(ranks), better, "".join(thinned[:1]))


def result(demo: Demo, watch: Watch, how: Recording) -> dict[str, Any]:
    """Return what `--json` prints."""
    view, fired = watch.last, demo.fired()
    truth = fired and {key: fired[key] for key in ("fault", "rank", "start_step")}
    verdict = _verdict(view)
    if truth is None:
        match = demo.plan.fault is None and verdict is None and watch.is_over
    else:
        match = verdict is not None and (verdict["kind"], verdict["ranks"]) == (
            truth["fault"],
            [truth["rank"]],
        )
    findings = [] if view is None else view.findings
    return {
        "truth": truth,
        "verdict": verdict,
        "match": match,
        "not_judged": "" if match else _not_compared(demo, watch, truth),
        "collectives": how.source,
        "better_source": how.better,
        "thinned": how.thinned,
        "url": demo.url,
        "findings": [
            {field: finding[field] for field in ("kind", "severity", "ranks", "what")}
            for finding in findings
        ],
        "named_after_seconds": _named_after_seconds(fired, findings),
    }


def _verdict(view: View | None) -> dict[str, Any] | None:
    if view is None or view.verdict is None or view.verdict["severity"] == "info":
        return None
    return {field: view.verdict[field] for field in VERDICT_FIELDS}


def _not_compared(demo: Demo, watch: Watch, truth: dict[str, Any] | None) -> str:
    """Return why it is too early, or impossible, to call a verdict wrong; empty if it is wrong."""
    if not watch.is_over:
        return "the run was stopped before its verdict stood"
    if watch.arriving:
        return watch.arriving
    if truth is None and demo.plan.fault is not None:
        return f"the fault never began; the output of the training is in {demo.training_log}"
    return ""


def _by_ranks(ranks: dict[str, list[int]]) -> str:
    if len(ranks) <= 1:
        return "".join(ranks)
    return "; ".join(f"{name} in ranks {sorted(members)}" for name, members in ranks.items())


def _named_after_seconds(
    fired: dict[str, Any] | None, findings: list[dict[str, Any]]
) -> float | None:
    """Return the time from the fault's first firing to the finding that names it."""
    # a slow rank's finding may be older: noise of the same rank opens it as info
    if fired is None or fired["fault"] not in ("hang", "crash"):
        return None
    began_ms = fired["start_time_ns"] / 1e6
    opened = [
        finding["opened_ms"]
        for finding in findings
        if finding["kind"] == fired["fault"] and finding["ranks"] == [fired["rank"]]
    ]
    return round((min(opened) - began_ms) / 1e3, 3) if opened else None
