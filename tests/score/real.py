"""Runs on real ranks: the record of one, what became of it, and their rows of the score card.

The file of records is JSON lines, one run each, as `benchmarks/real_ranks.py` writes them; that of
costs, one pair of runs each, is of `benchmarks/real_costs.py`. A later record of the same fault,
strategy and seed stands for an earlier one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.score.card import share, spread

EVERYBODY = -1  # the rank of a fault that is the run's: no rank is to blame
NO_FAULT = "none"
MAX_DRIFT = 0.05  # two runs that far apart before a fault say more of the machine than of it
RIGHT, SILENT, OTHER = "right", "said nothing", "other kind"
ACCUSES, FALSE_ALARM, NOT_FIRED = "accuses", "false alarm", "the fault did not fire"
_FOUND = ("kind", "severity", "ranks", "onset_step", "cost_throughput_ratio")


@dataclass
class RealRun:
    """One run: what was planted, what was said. Times in seconds, shares of 0 to 1."""

    fault: str
    strategy: str
    seed: int
    rank: int
    ranks: int
    expected_kind: str
    fired: dict[str, Any] | None = None  # from the manifest: first step, size
    found: list[dict[str, Any]] = field(default_factory=list)
    verdict: dict[str, Any] | None = None  # its kind and ranks
    named_after_seconds: float | None = None
    judgement: str = ""  # one of the words above, and what was said instead
    wall_seconds: float = 0.0


@dataclass
class CostPair:
    """What a fault costs of the throughput, as said and as measured without Rankscope."""

    fault: str
    strategy: str
    seed: int
    ranks: int
    steps: int  # of each run that count: from the first one with the fault
    without_ms: float  # mean step of the run without the fault, by the trainer's own clock
    with_ms: float
    truth: float  # 1 - without / with
    said: float | None  # by the finding that names the fault; None: nothing named it
    # How much slower the run with the fault was before it: what the machine did, not the fault.
    drift: float | None = None

    @property
    def is_comparable(self) -> bool:
        """Return whether the two runs were alike before the fault."""
        return self.drift is None or abs(self.drift) <= MAX_DRIFT

    @property
    def error_points(self) -> float | None:
        """Return by how many points of a hundred what was said is above the truth.

        None where nothing was said, or where the machine changed more than the fault could tell.
        """
        if self.said is None or not self.is_comparable:
            return None
        return 100 * (self.said - self.truth)


def pair_of(
    run: RealRun, with_times: Path, without_times: Path, settle_steps: int = 5
) -> CostPair | None:
    """Return the cost of a run's fault, None where too few steps are there to tell.

    The times are those that the trainer wrote (`--step-times`). Steps are counted from the first
    with the fault to the last of both runs; the first ones of a run warm up.
    """
    if run.fired is None:
        return None
    edges = [step_edges(path) for path in (with_times, without_times)]
    begin = max(int(run.fired["start_step"]), settle_steps)
    end = min(max(edge, default=0) for edge in edges)
    if end - begin < settle_steps:
        return None
    with_ms, without_ms = (mean_step_ms(edge, begin, end) for edge in edges)
    drift = None
    if begin - settle_steps > settle_steps:
        before, calm = (mean_step_ms(edge, settle_steps, begin - 1) for edge in edges)
        drift = before / calm - 1
    costs = [one["cost_throughput_ratio"] for one in run.found
             if is_named(run, one) and one.get("cost_throughput_ratio") is not None]  # fmt: skip
    return CostPair(
        run.fault, run.strategy, run.seed, run.ranks, end - begin + 1, without_ms, with_ms,
        1 - without_ms / with_ms, max(costs, default=None), drift,
    )  # fmt: skip


def step_edges(path: Path) -> dict[int, tuple[int, int]]:
    """Return when the first rank began each step and the last one was through with it, ns."""
    found: dict[int, tuple[int, int]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        one = json.loads(line)
        began, ended = found.get(one["step"], (one["began_ns"], one["ended_ns"]))
        found[one["step"]] = min(began, one["began_ns"]), max(ended, one["ended_ns"])
    return found


def mean_step_ms(edges: dict[int, tuple[int, int]], first: int, last: int) -> float:
    """Return the mean time of the steps from one to another, both counted."""
    return (edges[last][1] - edges[first][0]) / 1e6 / (last - first + 1)


Record = TypeVar("Record", RealRun, CostPair)


def is_named(run: RealRun, finding: dict[str, Any]) -> bool:
    """Return whether a finding names the planted fault, with exactly its ranks."""
    if finding["kind"] != run.expected_kind:
        return False
    if run.rank == EVERYBODY:  # how the run was set up: advice about it is info
        return True
    return bool(finding["severity"] != "info" and finding["ranks"] == [run.rank])


class FirstNamed:
    """When a run's fault was first named.

    A finding may open as info and become a warning later, so its opening is not that moment.
    """

    def __init__(self, run: RealRun) -> None:
        self._run = run
        self.at_seconds: float | None = None

    def look(self, findings: Iterable[dict[str, Any]], now_seconds: float) -> None:
        """Take the findings of one moment."""
        if self.at_seconds is None and any(is_named(self._run, finding) for finding in findings):
            self.at_seconds = now_seconds


def judge(run: RealRun) -> str:
    """Return "right", or what is wrong."""
    loud = [finding for finding in run.found if finding["severity"] != "info"]
    if run.fault == NO_FAULT:
        return f"{FALSE_ALARM}: {loud[0]['kind']} {loud[0]['what']}" if loud else RIGHT
    if run.fired is None:
        return NOT_FIRED
    if run.rank != EVERYBODY:
        accused = {rank for finding in loud for rank in finding["ranks"]} - {run.rank}
        if accused:
            return f"{ACCUSES} healthy ranks {sorted(accused)}"
    if any(is_named(run, finding) for finding in run.found):
        return RIGHT
    if not loud:
        return SILENT
    return f"{OTHER}: " + ", ".join(f"{one['kind']} {one['ranks']}" for one in loud)


def record_of(run: RealRun) -> dict[str, Any]:
    """Return a run as it is kept: without what was said in passing of something else.

    The words of findings are kept only where they are not right.
    """
    kept = dataclasses.asdict(run)
    names = _FOUND if run.judgement == RIGHT else (*_FOUND, "what")
    kept["found"] = [
        {name: _short(one[name]) for name in names if one.get(name) is not None}
        for one in run.found
        if one["severity"] != "info" or one["kind"] == run.expected_kind
    ]
    kept["fired"] = run.fired and {
        name: run.fired[name] for name in ("start_step", "size") if name in run.fired
    }
    kept["verdict"] = run.verdict and {name: run.verdict[name] for name in ("kind", "ranks")}
    return {name: _short(value) for name, value in kept.items()}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def read(kind: type[Record], *paths: Path) -> list[Record]:
    """Return the newest record of each fault, strategy and seed, of files that are there."""
    names = {one.name for one in dataclasses.fields(kind)}
    newest: dict[tuple[str, str, int], Record] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else []:
            one = kind(**{name: value for name, value in json.loads(line).items() if name in names})
            if isinstance(one, RealRun):
                one.judgement = judge(one)  # by the rules of now
            newest[one.fault, one.strategy, one.seed] = one
    return [newest[key] for key in sorted(newest)]


def write(path: Path, records: Iterable[Record]) -> None:
    """Write records, a line each, in the order of fault, strategy and seed."""
    ordered = sorted(records, key=lambda one: (one.fault, one.strategy, one.seed))
    lines = [record_of(one) if isinstance(one, RealRun)
             else {name: _short(value) for name, value in dataclasses.asdict(one).items()}
             for one in ordered]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.rename(path)


REAL_HEAD = (
    "| fault | strategies | runs | right | said nothing | other kind | healthy rank accused | did "
    "not fire | time to name, s: median (max) | cost error, points: median (max) |"
)


def real_rows(runs: Sequence[RealRun], costs: Sequence[CostPair]) -> list[str]:
    """Return the table of runs on real ranks: a row per fault, all of them, and clean runs."""
    lines = [REAL_HEAD, "|" + "---|" * 10]
    planted = [run for run in runs if run.fault != NO_FAULT]
    for fault in dict.fromkeys(one.fault for one in planted):
        mine = [one for one in planted if one.fault == fault]
        lines.append(_real_row(fault, mine, [cost for cost in costs if cost.fault == fault]))
    if planted:
        lines.append(_real_row("all faults", planted, costs))
    clean = [run for run in runs if run.fault == NO_FAULT]
    if clean:
        lines.append(_real_row("none (clean)", clean, ()))
    return lines


def _real_row(name: str, mine: Sequence[RealRun], costs: Sequence[CostPair]) -> str:
    count = {word: sum(one.judgement.startswith(word) for one in mine)
             for word in (RIGHT, SILENT, OTHER, ACCUSES, FALSE_ALARM, NOT_FIRED)}  # fmt: skip
    named = [one.named_after_seconds for one in mine if one.named_after_seconds is not None]
    errors = [abs(cost.error_points) for cost in costs if cost.error_points is not None]
    cells = (
        name, ", ".join(sorted({one.strategy for one in mine})), len(mine),
        share(count[RIGHT], len(mine) - count[NOT_FIRED]), count[SILENT], count[OTHER],
        count[ACCUSES] + count[FALSE_ALARM], count[NOT_FIRED], spread(named), spread(errors),
    )  # fmt: skip
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def cost_rows(costs: Sequence[CostPair]) -> list[str]:
    """Return the table of pairs of runs with and without a fault."""
    lines = ["| fault | strategy | seed | ranks | step without, ms | step with, ms | before the "
             "fault | true cost | said | difference, points |", "|" + "---|" * 10]  # fmt: skip
    for cost in costs:
        error = cost.error_points
        cells = (
            cost.fault, cost.strategy, cost.seed, cost.ranks, f"{cost.without_ms:.1f}",
            f"{cost.with_ms:.1f}", "-" if cost.drift is None else f"{100 * cost.drift:+.1f} %",
            f"{100 * cost.truth:.1f} %",
            "nothing" if cost.said is None else f"{100 * cost.said:.1f} %",
            "not comparable" if not cost.is_comparable
            else "-" if error is None else f"{error:+.1f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def miss_rows(runs: Sequence[RealRun]) -> list[str]:
    """Return a line for each run that is not right."""
    return [f"- {run.fault}, {run.strategy}, seed {run.seed}: {run.judgement}"
            for run in runs if not run.judgement.startswith(RIGHT)]  # fmt: skip
