"""Whether the steps of ranks can be compared, and which ranks with which."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from rankscope_server.diagnose.window import Window
from rankscope_server.findings.finding import NOT_HERE
from rankscope_server.findings.statistics import Array, median
from rankscope_server.findings.text import capital, percent_text, ranks_text
from rankscope_server.observe.step_table import StepTable

_NEAR = 4  # steps around a sampled one


def lack_of(window: Window) -> tuple[str, str] | None:
    """Return (reason, remedy) if there is too little to compare."""
    table, policy = window.steps, window.policy
    if window.world_size == 1:
        return "one rank has no peer to be compared with", NOT_HERE
    if not table.num_steps:
        return "no step has ended yet", "wait, or call rankscope.step() once a step"
    seen = np.flatnonzero(table.seen())
    steps = len(seen) + table.dropped_steps
    if steps < policy.min_steps:
        whole = "" if len(seen) == table.num_steps else " whose waits are known"
        return f"needs {policy.min_steps} steps{whole}, has {steps}", "wait"
    if len(table.ranks) < 2:
        return "only one rank reports steps", "attach the agent to all ranks"
    recent = table.get("own")[:, seen[-policy.recent_steps :]]
    missing = np.mean(np.isnan(recent), axis=1)
    if float(np.mean(missing)) > policy.max_missing_share:
        lacking = [r for r, share in zip(table.ranks, missing, strict=True)
                   if share > policy.max_missing_share]  # fmt: skip
        return (
            f"of {ranks_text(lacking)} {percent_text(float(np.mean(missing[missing > 0])))} of the "
            "newest steps cannot be compared: they are missing, or what the ranks waited is not "
            "known",
            "see the agent page: sources and losses of these ranks",
        )
    return None


def unmatched(window: Window) -> tuple[str, str] | None:
    """Return (reason, remedy) if the calls of some ranks are not recorded like those of others."""
    ranks = [rank for rank, state in window.states.items() if not state.is_recording]
    if not ranks:
        return None
    return (
        f"{capital(ranks_text(ranks))} cannot be compared with the others: switched off, or "
        "switched on alone",
        "switch recording on in all ranks at once, or restart the run",
    )


def as_devices_report(window: Window) -> Window:
    """Return the window with the steps of devices, where hosts only enqueue and these are known."""
    if not all(window.runs_on_device(rank) for rank in window.ranks) or not are_typical(window):
        return window
    return replace(window, steps=window.device_steps)


def are_typical(window: Window) -> bool:
    """Return whether the steps that devices report are enough, and take as long as those between.

    They are some, such as every fourth: of a script that logs as often they are all unlike others.
    """
    table, sampled = window.steps, window.device_steps.steps
    if len(sampled) < window.policy.min_steps:
        return False
    first = int(np.searchsorted(table.steps, sampled[-window.policy.recent_steps :][0]))
    times_ms = median(table.get("duration", first)[table.some_rows()].astype(float), 0)
    is_usual = ~table.special(first) & ~np.isnan(times_ms)
    is_sampled = np.isin(table.steps[first:], sampled)
    measured, between = (np.flatnonzero(is_usual & some) for some in (is_sampled, ~is_sampled))
    if not len(measured) or len(between) < _NEAR:
        return bool(len(measured))
    # each is compared with the nearest others: step time may change meanwhile
    begin = np.searchsorted(between, measured) - _NEAR // 2
    near = np.clip(begin, 0, len(between) - _NEAR)[:, None] + np.arange(_NEAR)
    ratios = np.log(times_ms[measured] / np.median(times_ms[between[near]], axis=1))
    return bool(abs(float(ratios.mean())) < math.log(window.policy.sampled_unlike_ratio))


def roles_of(window: Window) -> dict[int, Hashable]:
    """Return the role of each rank: ranks of different roles are never compared.

    The role of a rank that never registered is not known: it is compared with itself alone.
    """
    unknown = {rank: ("rank", rank) for rank in window.steps.ranks if rank not in window.ranks}
    return unknown | {
        rank: (known.role, known.stage, known.num_stages, known.num_microbatches)
        for rank, known in window.ranks.items()
    }


def do_alike(table: StepTable, rows: Sequence[int], columns: Array) -> bool:
    """Return whether all of them compute forwards and backwards, or none: else they differ by plan.

    An actor beside a learner, or a server of parameters, may have less to do for good.
    """
    there = (median(table.get(name)[rows][:, columns], 1) > 0 for name in ("forward", "backward"))
    return all(bool(one.all()) or not one.any() for one in there)
