"""Sums up outcomes as the tables of the score card."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

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
        mine = [outcome for outcome in outcomes if outcome.diagnosis == name]
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


def baseline_rows(outcomes: Iterable[Outcome]) -> list[str]:
    """Return what the rules of others name in the same runs, beside ours.

    A rule is right where it names exactly the ranks at fault; ranks beyond are accused though
    healthy.
    """
    ones = list(outcomes)
    names = list(dict.fromkeys(name for one in ones for name in one.baselines))
    lines = ["| diagnosis | rule | runs | exact | names no rank | names healthy ranks | healthy "
             "ranks named |", "|" + "---|" * 7]  # fmt: skip
    for diagnosis in dict.fromkeys(one.diagnosis for one in ones):
        for name in ("ours", *names):
            mine = [one for one in ones if one.diagnosis == diagnosis
                    and (name == "ours" or name in one.baselines)]  # fmt: skip
            if mine:
                lines.append(_baseline_row(diagnosis, name, mine))
    return lines


def _baseline_row(diagnosis: str, name: str, mine: Sequence[Outcome]) -> str:
    exact = silent = accuses = healthy = 0
    for one in mine:
        if name == "ours":
            extra = len(one.accused)
            exact += one.found == one.planted and not extra
            silent += one.was_silent or (not one.planted and not one.wrong)
        else:
            named, extra = one.baselines[name]
            exact += named == one.num_guilty and not extra
            silent += not named
        accuses, healthy = accuses + bool(extra), healthy + extra
    cells = (diagnosis, name, len(mine), share(exact, len(mine)), silent, accuses, healthy)
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
