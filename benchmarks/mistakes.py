"""Are the mistakes that most make once named on real ranks, and never called healthy?

    python benchmarks/mistakes.py [--seeds 10] [--clean 20] [--mistakes NAME,...] [--out FILE]
    python benchmarks/mistakes.py --table

One server takes all runs; each is the reference trainer under `rankscope run`, with one mistake of
`docs/mistakes.md` or with none. A refused setting is drawn by the seed; right is that the headline
holds the line by which the trainer refuses it. Wrong is a mistake that is not named or is called
healthy, and a mistake that is named where there is none. Resumes where it was stopped; results are
in benchmarks/results/mistakes.jsonl, a row for each mistake, seed and label of the code; without
rows of this code the table is made of those that there are. Exit code 1 if one row is wrong.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from real_ranks import CASES, CLEAN, NO_FAULT, RIGHT, ROOT, Case, Server, findings_of, run_case
from rows import RESULTS, Key, Rows, code_label, newest

from rankscope_trainer.faults import FAULTS

KEYS = ("mistake", "seed")
SMALL = ("--layers", "2", "--data-bytes", "65536")  # several epochs in a run
FAULTY = (
    "forgotten_sampler", "forgotten_set_epoch", "no_gradient", "divided_twice", "not_divided",
)  # fmt: skip
OF_LAYOUT = ("uneven_stages", "few_microbatches", "slow_checkpoint", "rare_checkpoint")
REFUSED = "refused_setting"
REFUSALS = (  # ranks, and the flags of a command that cannot be run on so many
    (3, "--strategy", "tensor"),
    (4, "--strategy", "pipeline", "--layers", "2"),
    (2, "--heads", "3"),
    (2, "--batch-size", "0"),
    (2, "--no-such-flag", "1"),
    (3, "--config", "nowhere.toml"),
    (2, "--steps", "many"),
    (3, "--strategy", "hybrid"),
    (2, "--fault", "no_such_fault:rank=0,start=1"),
    (2, "--optimizer", "lion"),
)
LAYERED = ("pipeline", "pipedream", "hybrid")  # on more ranks than a small model has layers
HEALTHY = "called healthy"
KINDS = frozenset({fault.finding for fault in FAULTS if fault.name in FAULTY} | {"failed_start"})


def run_one(server: Server, mistake: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run the trainer once and return what became of it."""
    if mistake == REFUSED:
        return _refused(server, seed, folder)
    if mistake == NO_FAULT:
        strategy, ranks = CLEAN[seed % len(CLEAN)]
        more = ("--microbatches", "3") if strategy == "ddp" else ()
        flags = () if strategy in LAYERED else (*SMALL, *more)
        case = Case(NO_FAULT, strategy, ranks, 120, None, flags=flags)
    elif mistake in OF_LAYOUT:
        (case,) = (one for one in CASES if one.fault == mistake)
    else:
        case = Case(mistake, steps=120, start=(1, 1), flags=SMALL, everybody=True)
    outcome = run_case(server, case, seed, folder)
    run_id = f"{case.fault}-{case.strategy}-{seed}"
    answer = server.get(f"runs/{run_id}").get("answer", {})
    judgement = outcome.judgement
    if mistake == NO_FAULT:  # what a busy machine does to the ranks' times is no mistake
        false = [one["what"] for one in findings_of(server, run_id) if one["kind"] in KINDS]
        judgement = f"says {false[0]}" if false else RIGHT
    elif answer.get("state") == "healthy":
        judgement = HEALTHY
    return {
        "judgement": judgement, "answer": answer.get("text", ""), "strategy": case.strategy,
        "named_after_seconds": outcome.named_after_seconds,
    }  # fmt: skip


def _refused(server: Server, seed: int, folder: Path) -> dict[str, Any]:
    ranks, *flags = REFUSALS[seed % len(REFUSALS)]
    run_id = f"{REFUSED}-{seed}"
    log = folder / f"{run_id}.log"
    with log.open("wb") as output:
        subprocess.run(
            [sys.executable, "-m", "rankscope", "run", "--server", server.url, "--run-id", run_id,
             "--dir", str(folder / run_id), "--", sys.executable, "-m", "torch.distributed.run",
             "--standalone", "--nproc-per-node", str(ranks), "-m", "rankscope_trainer", *flags],
            stdout=output, stderr=output, check=False, timeout=120, cwd=ROOT,
        )  # fmt: skip
    said = re.search(r"^rankscope_trainer: (setting .{20,100})", log.read_text(), re.M)
    answer = server.get(f"runs/{run_id}")["answer"]["text"]
    is_right = said is not None and said[1].rstrip(".") in answer
    return {
        "judgement": RIGHT if is_right else "another headline", "answer": answer,
        "strategy": " ".join(flags), "named_after_seconds": None,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table by mistake."""
    lines = [
        "| mistake | runs | right | called healthy | otherwise wrong |",
        "|---|---|---|---|---|",
    ]
    for mistake in dict.fromkeys(row["mistake"] for row in rows):
        said = [row["judgement"] for row in rows if row["mistake"] == mistake]
        right, healthy = said.count(RIGHT), said.count(HEALTHY)
        lines.append(
            f"| {mistake} | {len(said)} | {right} | {healthy} | {len(said) - right - healthy} |"
        )
    return lines


def wanted_runs(chosen: argparse.Namespace) -> list[Key]:
    """Return the runs that were asked for, all of a seed before the next."""
    mistakes = chosen.mistakes.split(",")
    runs = [(mistake, seed) for seed in range(1, chosen.seeds + 1) for mistake in mistakes]
    clean = [(NO_FAULT, seed) for seed in range(chosen.clean)]
    random.Random(0).shuffle(clean)
    return [*runs, *clean]


def main() -> int:
    """Run what is missing, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each mistake")
    parser.add_argument("--clean", type=int, default=20, help="runs without a mistake")
    parser.add_argument(
        "--mistakes", default=",".join((REFUSED, *FAULTY, *OF_LAYOUT)), help="only these"
    )
    parser.add_argument("--label", default=code_label(), help="of the code (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "mistakes.jsonl")
    parser.add_argument("--table", action="store_true", help="run nothing")
    chosen = parser.parse_args()
    rows = Rows(chosen.out, KEYS, chosen.label)
    missing = [] if chosen.table else rows.missing(wanted_runs(chosen))
    if missing:
        with tempfile.TemporaryDirectory(prefix="rankscope-mistakes-") as scratch:
            server = Server(Path(scratch))
            try:
                for key in missing:
                    row = rows.add(key, run_one(server, *key, Path(scratch)))
                    print(f"{key[0]:<22}seed {key[1]:<3} {row['judgement']}", flush=True)
            finally:
                server.close()
    made = rows.all() or newest(chosen.out, KEYS)
    print("\n".join(table(made)))
    return 0 if made and all(row["judgement"] == RIGHT for row in made) else 1


if __name__ == "__main__":
    sys.exit(main())
