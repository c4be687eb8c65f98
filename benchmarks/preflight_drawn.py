"""The second laboratory of preflight: faults drawn by a generator, remedies executed.

    python benchmarks/preflight_drawn.py truth                       what the real job does
    python benchmarks/preflight_drawn.py draws --count 200 --seed 7  what preflight says, and mends
    python benchmarks/preflight_drawn.py healthy --count 100 --seed 7
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.preflight.drawn import harm
from tests.preflight.drawn.catalogue import HEALTHY as HEALTHY_KINDS
from tests.preflight.drawn.catalogue import KINDS, Draw, draw, draws
from tests.preflight.drawn.judge import Judgement, ask, judge, laboratory
from tests.preflight.drawn.remedies import execute, flaws
from tests.preflight.drawn.world import Kind
from tests.preflight.scene import Scene

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRUTH = RESULTS / "preflight_drawn_truth.json"
DRAWS = RESULTS / "preflight_drawn.json"
HEALTHY = RESULTS / "preflight_drawn_healthy.json"
DOCUMENT = ROOT / "docs" / "preflight_drawn.md"
NUM_TRIES = 12  # of a fault that the job meets by chance
SLOW_FACTOR = 3.0  # against the median step of a healthy laboratory on the same machine
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
            rows = {**self.read(), key: row}
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
    elif (last.get("median_ms") or 0.0) > SLOW_FACTOR * _healthy_ms(drawn):
        truth = "slow"
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
    names: list[str],
    count: int,
    seed: int,
    *,
    is_quick: bool,
    is_crowded: bool,
    has_job: bool,
) -> int:
    """Draw, judge the answers, execute the remedies and look again."""
    known, wrong = kept.read(), 0
    for drawn in draws(count, seed, [ALL[name] for name in names]):
        key = f"{seed}/{drawn.kind.name}/{drawn.seed}"
        if key in known:
            continue
        row = try_draw(drawn, is_quick=is_quick, is_crowded=is_crowded, has_job=has_job)
        kept.keep(key, row)
        is_right = row["exact"] and row["mended"] not in ("no", "worse") and not row["harm"]
        wrong += not is_right
        print(f"{drawn.kind.name:24} {row['elapsed_s']:5.1f} s  {told(row)}", flush=True)
    return 1 if wrong else 0


def told(row: Row) -> str:
    """Return a row in a few words."""
    exact = "exact" if row["exact"] else "MISSED" if row["missed"] else "WRONG"
    mended = f"mended: {row['mended']}"
    return "; ".join(filter(None, (exact, mended, *row["harm"], *row["misses"][:2])))


def try_draw(drawn: Draw, *, is_quick: bool, is_crowded: bool, has_job: bool) -> Row:
    """Break a laboratory, ask preflight, do what it says, ask again."""
    started = time.monotonic()
    with laboratory(drawn) as scene:
        drawn.case.inject(scene)
        harm.plant(scene)
        trial = ask(scene, drawn, is_quick=is_quick, is_crowded=is_crowded)
        found = judge(drawn, trial)
        row = {
            "kind": drawn.kind.name, "seed": drawn.seed, "says": drawn.case.says,
            "mode": drawn.world.mode, "truth": drawn.kind.truth, "exact": not found.misses,
            "missed": found.is_missed, "misses": found.misses[:8],
            "exits": [answer.exit_code for answer in trial.answers],
            "found": [f"{f.status} {f.id}: {f.title}" for f in found.findings],
            "answer_s": round(trial.elapsed_s, 1), "load": round(os.getloadavg()[0], 1),
        }  # fmt: skip
        row.update(_mend(scene, drawn, found, has_job=has_job))
    return {**row, "elapsed_s": round(time.monotonic() - started, 1)}


def _mend(scene: Scene, drawn: Draw, found: Judgement, *, has_job: bool) -> Row:
    if not found.findings:
        return {"mended": "-", "harm": [], "fixes": []}
    before = harm.look(scene)
    executed = execute(scene, found.findings)
    named = {one.node for one in executed}
    damage = harm.done(drawn.world, before, harm.look(scene), named)
    damage += [flaw for f in found.findings for fix in f.fix for flaw in flaws(fix)]
    again = judge(drawn, ask(scene, drawn))
    ids = {finding.id for finding in found.findings}
    fails = {finding.id for finding in again.findings if finding.status == "fail"}
    damage += [f"a new failure: {id}" for id in sorted(fails - ids)]
    is_gone = not fails and not ids & {finding.id for finding in again.findings}
    mended = "command" if is_gone else "person" if any(e.is_person for e in executed) else "no"
    row: Row = {
        "mended": mended, "harm": damage,
        "fixes": [
            {"node": e.node, "owner": e.owner, "command": e.command, "exit": e.exit_code,
             "said": e.said}
            for e in executed
        ],
        "again": [f"{f.status} {f.id}: {f.title}" for f in again.findings],
    }  # fmt: skip
    if has_job and is_gone and drawn.kind.truth in ("breaks", "sometimes"):
        from benchmarks.preflight_drawn_job import run_job

        row["job"] = run_job(scene, drawn.case.job)["worked"]
        row["mended"] = mended if row["job"] else "no"
    return row


# ---- the command line


def _chosen(words: list[str], among: dict[str, Kind]) -> list[str]:
    names = [name for name, kind in among.items() if not words or {name, kind.family} & {*words}]
    if not names:
        raise SystemExit(f"no such kind or family: {' '.join(words)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    truth = commands.add_parser("truth")
    truth.add_argument("--kinds", nargs="*", default=[])
    truth.add_argument("--seed", type=int, default=1)
    truth.add_argument("--at-once", type=int, default=6)
    for name in ("draws", "healthy"):
        drawing = commands.add_parser(name)
        drawing.add_argument("--kinds", nargs="*", default=[], help="by name or family")
        drawing.add_argument("--count", type=int, default=0, help="default: each kind once")
        drawing.add_argument("--seed", type=int, default=1)
        drawing.add_argument("--quick", action="store_true", help="preflight --quick")
        drawing.add_argument("--crowded", action="store_true", help="times of timed kinds only")
        drawing.add_argument("--job", action="store_true", help="run the job after the remedies")
    chosen = parser.parse_args()
    if chosen.command == "truth":
        return measure_truth(_chosen(chosen.kinds, ALL), chosen.seed, chosen.at_once)
    is_healthy = chosen.command == "healthy"
    names = _chosen(chosen.kinds, HEALTHY_KINDS if is_healthy else KINDS)
    return measure_draws(
        Rows(HEALTHY if is_healthy else DRAWS), names, chosen.count or len(names), chosen.seed,
        is_quick=chosen.quick, is_crowded=chosen.crowded, has_job=chosen.job,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
