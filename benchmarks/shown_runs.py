"""Runs that fill every page of the dashboard: real ones beside simulated ones."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.server.seed import seed_run, wait_until_judged
from tests.web.preflights import keep_two

MAIN, BEFORE = "slow", "gpus"  # the run of the pictures, and what it is compared with
NUM_WEEKS, WEEK_NS = 8, 7 * 86_400 * 10**9
TRAIN_SECONDS = 900.0
# of the reference trainer: how many ranks, and its options
TRAINED = {
    "trained": (4, "--steps 160 --fault slow_data:rank=2,start=60"),
    "trained-pipeline": (4, "--strategy pipeline --steps 120 --fault uneven_stages"),
    "trained-servers": (4, "--strategy parameter_server --servers 2 --steps 120 --fault hot_shard"),
    "trained-leak": (2, "--steps 160 --fault memory_leak:rank=1,start=40"),
    "trained-nan": (2, "--steps 80 --fault nan_data:rank=1,start=40"),
    "trained-crash": (2, "--steps 80 --fault crash:rank=1,start=40"),
}


def train(url: str, run: str, ranks: int, *options: str) -> None:
    """Train with the reference trainer, watched. Raises TimeoutExpired; a crash is no error."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "rankscope", "run", "--run-id", run, "--server", url, "--",
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(ranks), "-m", "rankscope_trainer", *options,
        ]  # fmt: skip
        environ = os.environ | {"HOME": folder, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, cwd=folder, env=environ, timeout=TRAIN_SECONDS, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


def simulate(url: str) -> None:
    """Send a live run, one that hangs, those of the weeks before, and two preflights."""
    now_ns = time.time_ns()
    for week in range(NUM_WEEKS, 0, -1):
        seed_run(
            url, run_id=f"week-{week}", ranks=16, ranks_per_node=4, steps=600 + 300 * (week % 3),
            steps_per_batch=300, fault="slow_compute" if week % 2 else "none", slow_rank=5,
            gpus=True, start_ns=now_ns - week * WEEK_NS,
        )  # fmt: skip
    seed_run(url, run_id=BEFORE, ranks=16, ranks_per_node=4, steps=900, fault="none", gpus=True)
    seed_run(
        url, run_id="hang", ranks=64, ranks_per_node=8, steps=120, steps_per_batch=60, fault="hang",
        slow_rank=7,
    )  # fmt: skip
    seed_run(
        url, run_id=MAIN, ranks=1_024, ranks_per_node=64, steps=120, steps_per_batch=60,
        fault="slow_compute", slow_rank=411, gpus=True, end=False,
    )  # fmt: skip
    keep_two(url, MAIN)


def fill(url: str) -> list[str]:
    """Send all of them; return the runs that are worth a picture of each page."""
    simulate(url)
    for run, (ranks, options) in TRAINED.items():
        train(url, run, ranks, *options.split())
    wait_until_judged(url, 600)
    return [MAIN, "hang", *TRAINED]
