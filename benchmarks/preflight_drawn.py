"""The second laboratory of preflight: faults drawn by a generator, remedies executed.

    python benchmarks/preflight_drawn.py truth                       what the real job does
    python benchmarks/preflight_drawn.py draws --count 200 --seed 7  what preflight says, and mends
    python benchmarks/preflight_drawn.py healthy --count 100 --seed 7
    python benchmarks/preflight_drawn.py written --job               the first laboratory's remedies
    python benchmarks/preflight_drawn.py table                       docs/preflight_drawn.md

Each keeps its rows in benchmarks/results, and goes on where it was stopped. Beside a secret seed of
one's own, `--kinds` chooses kinds by their names or families.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.preflight_drawn_table import write
from tests.capabilities import reason
from tests.preflight.drawn.catalogue import HEALTHY as HEALTHY_KINDS
from tests.preflight.drawn.catalogue import KINDS, Draw, draw, draws
from tests.preflight.drawn.catalogue import WRITTEN as FIRST
from tests.preflight.drawn.judge import laboratory
from tests.preflight.drawn.rounds import Round, try_draw
from tests.preflight.drawn.world import Kind
from tests.preflight.scene import Scene

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRUTH = RESULTS / "preflight_drawn_truth.json"
DRAWS = RESULTS / "preflight_drawn.json"
HEALTHY = RESULTS / "preflight_drawn_healthy.json"
WRITTEN = RESULTS / "preflight_drawn_written.json"
NUM_TRIES = 12  # of a fault that the job meets by chance
SLOW_FACTOR = 1.5  # against the median step of a healthy laboratory on the same machine
_TORCHRUN_CUT_S = 90.0
ALL = {**KINDS, **HEALTHY_KINDS}
Row = dict[str, Any]


class Rows:
    """The rows of a result file, by key; each is kept at once, whoever else writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = path.with_suffix(".lock")

    def read(self) -> dict[str, Row]:
        """Return all rows by their keys."""
        if not self._path.exists():
            return {}
        read: dict[str, Row] = json.loads(self._path.read_text())
        return read

    def keep(self, key: str, row: Row) -> None:
        """Add a row, or replace the one of the same key."""
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            plain = json.loads(json.dumps(row).replace(f"{ROOT}/", ""))  # from whatever clone
            rows = {**self.read(), key: plain}
            text = ",\n".join(f" {json.dumps(k)}: {json.dumps(rows[k])}" for k in sorted(rows))
            part = self._path.with_suffix(".part")
            part.write_text(f"{{\n{text}\n}}\n")
            part.replace(self._path)
        self._lock.unlink(missing_ok=True)


# ---- what the real job does


def measure_truth(names: Iterable[str], seed: int, num_at_once: int) -> int:
    """Run the job once under each kind (that it meets by chance: until it breaks)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import benchmarks.preflight_drawn_job  # noqa: F401  (once, for all that are forked)

    known = Rows(TRUTH).read()
    waiting = [(name, seed) for name in names if name not in known]
    with multiprocessing.get_context("fork").Pool(num_at_once, maxtasksperchild=1) as pool:
        for name, row in pool.imap_unordered(_truth, waiting):
            Rows(TRUTH).keep(name, row)
            mark = "" if row["truth"] == ALL[name].truth else f"  NOT {ALL[name].truth}"
            print(f"{name:24} {row['truth']:10}{mark}  {row['says']}  {row['nodes']}", flush=True)
    return 0


def _truth(what: tuple[str, int]) -> tuple[str, Row]:
    name, seed = what
    kind = ALL[name]
    drawn = draw(kind, seed)
    tries: list[Row] = []
    for _ in range(NUM_TRIES if kind.truth == "sometimes" else 1):
        try:
            tries.append(_job(drawn))
        except Exception as error:  # noqa: BLE001  (one laboratory is not all of them)
            tries.append({"worked": False, "nodes": {"laboratory": repr(error)[:300]}})
        if not tries[-1]["worked"]:
            break
    last, num_broken = tries[-1], sum(not one["worked"] for one in tries)
    truth = "works"
    if num_broken:
        truth = "sometimes" if kind.truth == "sometimes" else "breaks"
    elif kind.is_timed:
        last["healthy_ms"] = _healthy_ms(drawn)
        truth = "slow" if last["median_ms"] > SLOW_FACTOR * last["healthy_ms"] else "works"
    row = {"truth": truth, "says": drawn.case.says, "seed": seed, "mode": drawn.world.mode}
    return name, {**row, "tries": len(tries), "broken": num_broken, **last}


def _job(drawn: Draw) -> Row:
    from benchmarks.preflight_drawn_job import run_job

    with laboratory(drawn) as scene:
        drawn.case.inject(scene)
        if drawn.world.mode == "c10d":
            return _torchrun(scene)
        return run_job(scene, drawn.case.job)


def _healthy_ms(drawn: Draw) -> float:
    from benchmarks.preflight_drawn_job import run_job

    with laboratory(drawn) as scene:
        return float(run_job(scene)["median_ms"])


def _torchrun(scene: Scene) -> Row:
    """Launch by torchrun's own rendezvous, in which clocks are compared."""
    job = str(ROOT / "benchmarks" / "preflight_job.py")
    started = time.monotonic()
    children = [
        scene.start(
            number, ["torchrun", job], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            errors="replace",
        )
        for number in scene.everywhere
    ]  # fmt: skip
    nodes, worlds = {}, set()
    for number, child in enumerate(children):
        left = max(1.0, _TORCHRUN_CUT_S - (time.monotonic() - started))
        try:
            told, _ = child.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            nodes[f"node{number}"] = "hangs"
            continue
        nodes[f"node{number}"] = "done" if child.returncode == 0 else f"exit {child.returncode}"
        words = told.split("WORLD_SIZE=")
        worlds |= {int(word.split(")")[0]) for word in words[1:]}
    has_worked = set(nodes.values()) == {"done"} and worlds == {scene.lab.num_hosts}
    elapsed_s = round(time.monotonic() - started, 1)
    return {
        "worked": has_worked, "elapsed_s": elapsed_s, "worlds": sorted(worlds), "nodes": nodes,
    }  # fmt: skip


# ---- what preflight says, and whether its remedies mend


def measure_draws(
    kept: Rows,
    kinds: list[Kind],
    count: int,
    seed: int,
    *,
    is_quick: bool,
    is_crowded: bool,
    has_job: bool,
) -> int:
    """Draw, judge the answers, execute the remedies and look again."""
    known, wrong = kept.read(), 0
    for drawn in draws(count, seed, kinds):
        key = f"{seed}/{drawn.kind.name}/{drawn.seed}"
        if key in known:
            continue
        job = _job_after(drawn) if has_job else None
        round_ = try_draw(drawn, is_quick=is_quick, is_crowded=is_crowded, job=job)
        row = as_row(round_)
        kept.keep(key, row)
        wrong += not (round_.is_exact and round_.is_mended and not round_.harm)
        print(f"{drawn.kind.name:24} {row['elapsed_s']:5.1f} s  {told(row)}", flush=True)
    return 1 if wrong else 0


def told(row: Row) -> str:
    """Return a row in a few words."""
    exact = "exact" if row["exact"] else "MISSED" if row["missed"] else "WRONG"
    mended = f"mended: {row['mended']}{'' if row['is_mended'] else ' (NOT ENOUGH)'}"
    return "; ".join(filter(None, (exact, mended, *row["harm"], *row["misses"][:2])))


def as_row(round_: Round) -> Row:
    """Return what is kept of a round."""
    draw, found = round_.draw, round_.found
    return {
        "kind": draw.kind.name, "family": draw.kind.family, "seed": draw.seed,
        "says": draw.case.says, "mode": draw.world.mode, "truth": draw.kind.truth,
        "exact": round_.is_exact, "missed": found.is_missed, "misses": found.misses[:8],
        "exits": round_.exits,
        "found": [f"{f.status} {f.id}: {f.title}" for f in found.findings],
        "mended": round_.mended, "is_mended": round_.is_mended, "harm": round_.harm,
        "job": round_.job_works,
        "fixes": [
            {"node": e.node, "owner": e.owner, "command": e.command, "exit": e.exit_code,
             "said": e.said}
            for e in round_.executed
        ],
        "again": [f"{f.status} {f.id}: {f.title}" for f in round_.again],
        "answer_s": round(round_.answer_s, 1), "elapsed_s": round(round_.elapsed_s, 1),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def _job_after(drawn: Draw) -> Callable[[Scene], bool]:
    from benchmarks.preflight_drawn_job import run_job

    if drawn.world.mode == "c10d":
        return lambda scene: bool(_torchrun(scene)["worked"])
    return lambda scene: bool(run_job(scene, drawn.case.job)["worked"])


# ---- the command line


def _chosen(words: list[str], among: dict[str, Kind]) -> list[str]:
    names = [name for name, kind in among.items() if not words or {name, kind.family} & {*words}]
    if not names:
        raise SystemExit(f"no such kind or family: {' '.join(words)}")
    return [name for name in names if not _is_skipped(among[name])]


def _is_skipped(kind: Kind) -> bool:
    """Return whether this machine lacks what a kind needs, and say so."""
    reasons = list(filter(None, map(reason, kind.needs)))
    if reasons:
        print(f"{kind.name:24} skipped: {'; '.join(reasons)}", flush=True)
    return bool(reasons)


_KINDS_OF = {
    "draws": (DRAWS, KINDS), "healthy": (HEALTHY, HEALTHY_KINDS), "written": (WRITTEN, FIRST),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    truth = commands.add_parser("truth")
    truth.add_argument("--kinds", nargs="*", default=[])
    truth.add_argument("--seed", type=int, default=1)
    truth.add_argument("--at-once", type=int, default=6)
    for name in _KINDS_OF:
        drawing = commands.add_parser(name)
        drawing.add_argument("--kinds", nargs="*", default=[], help="by name or family")
        drawing.add_argument("--count", type=int, default=0, help="default: each kind once")
        drawing.add_argument("--seed", type=int, default=1)
        drawing.add_argument("--quick", action="store_true", help="preflight --quick")
        drawing.add_argument("--crowded", action="store_true", help="times of timed kinds only")
        drawing.add_argument("--job", action="store_true", help="run the job after the remedies")
    commands.add_parser("table")
    chosen = parser.parse_args()
    if chosen.command == "table":
        write({"truth": TRUTH, "draws": DRAWS, "healthy": HEALTHY, "written": WRITTEN})
        return 0
    if chosen.command == "truth":
        return measure_truth(_chosen(chosen.kinds, ALL), chosen.seed, chosen.at_once)
    path, kinds = _KINDS_OF[chosen.command]
    names = _chosen(chosen.kinds, kinds)
    return measure_draws(
        Rows(path), [kinds[name] for name in names], chosen.count or len(names), chosen.seed,
        is_quick=chosen.quick, is_crowded=chosen.crowded, has_job=chosen.job,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
