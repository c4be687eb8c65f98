"""Sums up outcomes as the tables of the score card."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from tests.score.cases import DIAGNOSES
from tests.score.outcome import Outcome

HEAD = (
    "| diagnosis | label | ranks | runs | planted | precision | recall | false alarms / 1,000 "
    "rank-hours | healthy ranks accused | said nothing when it should | time to name, s: median "
    "(max) | cost error, points: median (max) |"
)


def rows(outcomes: Sequence[Outcome], label: str) -> list[str]:
    """Return the table of our own findings, one row per diagnosis."""
    lines = [HEAD, "|" + "---|" * 12]
    for name in [one.name for one in DIAGNOSES]:
        mine = [one for one in outcomes if one.diagnosis == name]
        if mine:
            lines.append(_row(name, mine, label))
    lines.append(_row("all", outcomes, label))
    return lines


def _row(name: str, mine: Sequence[Outcome], label: str) -> str:
    planted, found = sum(one.planted for one in mine), sum(one.found for one in mine)
    right, wrong = sum(one.right for one in mine), sum(one.wrong for one in mine)
    hours = sum(one.rank_hours for one in mine)
    named = [one.named_after_s for one in mine if one.named_after_s is not None]
    errors = [100 * abs(one.cost - one.cost_truth) for one in mine
              if one.cost is not None and one.cost_truth is not None]  # fmt: skip
    sizes = sorted({one.num_ranks for one in mine})
    cells = (
        name, label, ", ".join(f"{size:,}" for size in sizes), len(mine), planted,
        share(right, right + wrong), share(found, planted), f"{1e3 * wrong / max(hours, 1e-9):.1f}",
        sum(len(one.accused) for one in mine), share(sum(one.was_silent for one in mine), planted),
        spread(named), spread(errors),
    )  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def share(part: int, whole: int) -> str:
    """Return a share in per cent with its count, a dash of nothing."""
    return f"{100 * part / whole:.1f} % ({part}/{whole})" if whole else "-"


def spread(values: Sequence[float]) -> str:
    """Return the median and the largest."""
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "-"


def baseline_rows(outcomes: Iterable[Outcome], guilty: dict[int, frozenset[int]]) -> list[str]:
    """Return what the rules of others name in the same runs, beside ours.

    `guilty` are the ranks at fault by `id` of the outcome. A rule is right where it names exactly
    them; ranks beyond are accused though healthy.
    """
    ones = list(outcomes)
    names = list(dict.fromkeys(name for one in ones for name in one.baselines))
    lines = ["| diagnosis | rule | runs | exact | names nobody | names healthy ranks | healthy "
             "ranks named |", "|" + "---|" * 7]  # fmt: skip
    for diagnosis in dict.fromkeys(one.diagnosis for one in ones):
        for name in ("ours", *names):
            mine = [one for one in ones if one.diagnosis == diagnosis
                    and (name == "ours" or name in one.baselines)]  # fmt: skip
            if mine:
                lines.append(_baseline_row(diagnosis, name, mine, guilty))
    return lines


def _baseline_row(
    diagnosis: str, name: str, mine: Sequence[Outcome], guilty: dict[int, frozenset[int]]
) -> str:
    exact = silent = accuses = healthy = 0
    for one in mine:
        truth = guilty[id(one)]
        if name == "ours":
            extra = set(one.accused)
            exact += one.found == one.planted and not extra
            silent += one.was_silent or (not one.planted and not one.wrong)
        else:
            named = set(one.baselines[name])
            extra = named - truth
            exact += named == truth
            silent += not named
        accuses, healthy = accuses + bool(extra), healthy + len(extra)
    cells = (diagnosis, name, len(mine), share(exact, len(mine)), silent, accuses, healthy)
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def real_rows(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table of runs on real ranks, by kind of fault."""
    lines = ["| fault | label | strategies | runs | recall | healthy ranks accused | time to name, "
             "s: median (max) | cost error, points: median (max) |", "|" + "---|" * 8]  # fmt: skip
    for fault in sorted({one["fault"] for one in results}):
        mine = [one for one in results if one["fault"] == fault]
        found = sum(is_found(one) for one in mine)
        accused = sum(len(accused_in(one)) for one in mine)
        named = [one["named_after_s"] for one in mine if one.get("named_after_s") is not None]
        errors = [100 * abs(one["cost"] - one["cost_truth"]) for one in mine
                  if one.get("cost") is not None and one.get("cost_truth") is not None]  # fmt: skip
        is_clean = fault in ("none", "", None)
        strategies = ", ".join(sorted({one["strategy"] for one in mine}))
        cells = (fault or "none", "real ranks", strategies, len(mine),
                 "-" if is_clean else share(found, len(mine)), accused, spread(named),
                 spread(errors))  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def is_found(result: dict[str, Any]) -> bool:
    """Return whether one of the expected kinds was found, on the rank where one is named."""
    rank = result.get("rank", -1)
    return any(
        one["kind"] in result["expected kinds"] and (not one["ranks"] or rank in one["ranks"])
        for one in result["found"]
    )


def accused_in(result: dict[str, Any]) -> set[int]:
    """Return the healthy ranks that a finding above info names."""
    loud = [one for one in result["found"] if one["severity"] != "info"]
    return {rank for one in loud for rank in one["ranks"]} - {result.get("rank", -1)}
