"""What the API shows of what a run cost: that which its analysis stored, with its words."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from rankscope.wire.schema import IMPORTED
from rankscope_server.answers import json_object
from rankscope_server.api.cost.schema import CostPart, CostWhatIf, RunCost
from rankscope_server.findings.text import percent_text
from rankscope_server.prices import Rate
from rankscope_server.text import plural, rank_list
from rankscope_server.verdict.cost import MAX_STEPS

SECONDS_PER_HOUR = 3600.0
PRODUCTIVE = "productive"
WHAT: dict[str, str] = {
    PRODUCTIVE: "Computing of steps that are kept",
    "straggling": "Other ranks wait for one that a finding calls slow: by how much it came "
    "after the last of its peers",
    "bubble": "Stages of a pipeline wait for each other, without the transfers between them",
    "waiting": "Ranks wait for others that came later, beyond straggling",
    "communication": "What no rank is spared in a step: transfers that computing does not hide",
    "communication or waiting": "Waits that could not be divided: of no step in memory is known "
    "which rank waited least",
    "data": "Waiting for the data loader",
    "evaluation": "Evaluation between the steps",
    "checkpoint": "Saving checkpoints, and waiting for ranks that save",
    "start-up": "From the first sign of the run, or of a rank, to its first step",
    "first steps": "What the first steps take beyond the others: compiling, allocating",
    "restart": "Between two attempts",
    "lost work": "Steps that a later attempt did again, with all their parts",
    "stuck or failing": "From a rank's last step to its end, where it hung or did not end cleanly",
    "after the end": "From a rank's last step to the end of the run",
    "unknown": "Time of which nothing was recorded",
}


def cost(run: sa.Row[Any], rate: Rate | None = None) -> RunCost:
    """Return what a run cost; `rate` is what an hour of a rank costs, None: it is not known."""
    stored = json_object(run.cost)
    if stored is None:
        return RunCost(
            text=_why_not(run), rank_hours=None, num_ranks=run.world_size, num_attempts=0,
            lost_steps=0, ettr=None, parts=[], slow_ranks=[], num_divided=0, what_if=None,
            no_what_if="", notes=[],
        )  # fmt: skip
    parts = parts_of(stored)
    found = stored["what_if"]
    return RunCost(
        text=sentence(parts),
        rank_hours=stored["wall_seconds"] / SECONDS_PER_HOUR,
        num_ranks=stored["num_ranks"],
        num_attempts=stored["num_attempts"],
        lost_steps=stored["lost_steps"],
        ettr=stored["ettr"],
        parts=parts,
        slow_ranks=stored["slow_ranks"],
        num_divided=stored["num_divided"],
        what_if=None if found is None else msgspec.convert(found, CostWhatIf),
        no_what_if=stored["no_what_if"],
        notes=_notes(stored),
        price_per_rank_hour=None if rate is None else rate.per_rank_hour,
        currency="" if rate is None else rate.currency,
        spot_per_rank_hour=None if rate is None else rate.spot_per_rank_hour,
        interruptions_per_hour=None if rate is None else rate.interruptions,
        restart_seconds=_restart_seconds(stored),
    )


def _restart_seconds(stored: Any) -> float | None:
    """Return what each interruption took of the run, the mean; None where there was none.

    Until the ranks were gone, until new ones came up, what these did again, and what a start takes,
    the mean over all attempts.
    """
    attempts, ranks = int(stored["num_attempts"]), int(stored["num_ranks"])
    if attempts < 2:
        return None
    parts: dict[str, float] = stored["parts"]
    once = sum(parts[name] for name in ("stuck or failing", "restart", "lost work"))
    each = sum(parts[name] for name in ("start-up", "first steps"))
    return (once / (attempts - 1) + each / attempts) / ranks


def parts_of(stored: Any) -> list[CostPart]:
    """Return the parts that took time: what was productive, then the largest first."""
    wall = stored["wall_seconds"]
    found = [
        CostPart(
            name=name, what=WHAT[name], rank_hours=seconds / SECONDS_PER_HOUR, share=seconds / wall
        )
        for name, seconds in stored["parts"].items()
        if wall > 0 and (seconds > 0 or name == PRODUCTIVE)
    ]
    return sorted(found, key=lambda part: (part.name != PRODUCTIVE, -part.share))


def sentence(parts: list[CostPart]) -> str:
    """Return how much was productive, and the largest other part."""
    if not parts:
        return "Not known: no time has passed"
    text = f"{percent_text(parts[0].share)} of the ranks' time went into computing that is kept"
    if len(parts) > 1:
        largest = parts[1]
        name = "not known" if largest.name == "unknown" else largest.name
        text += f"; most of the rest, {percent_text(largest.share)}, is {name}"
    return text


def _why_not(run: sa.Row[Any]) -> str:
    if run.launcher == IMPORTED:
        return "Not known: a recording is a part of a run"
    if not run.step:
        return "Not known: no step has ended yet"
    if run.status in ("ended", "failed"):
        return "Not known: the run was over before this server kept what runs cost"
    return "Not known yet: the next look at the run works it out"


def _notes(stored: Any) -> list[str]:
    notes = []
    if stored["num_divided"]:
        notes.append(
            f"Waits are divided by {plural(stored['num_divided'], 'step')} (at most the newest "
            f"{MAX_STEPS:,} of each attempt); their sum is measured in all steps"
        )
    if stored["slow_ranks"]:
        notes.append(f"Straggling is about {rank_list(stored['slow_ranks'])}")
    if stored["num_attempts"] > 1:
        notes.append(
            f"{plural(stored['num_attempts'] - 1, 'restart')}; "
            f"{plural(stored['lost_steps'], 'step')} done again"
        )
    return notes
