"""Jobs that lose ranks and train on: start them, disturb them, compare what was trained.

Each rank writes which windows it drew before it votes, and what was decided after; so even one that
is killed in between leaves no doubt, as the others have written the decision.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from rankscope_trainer.command_line import load_settings
from rankscope_trainer.data import Batches, ByteWindows, read_standard_library, split_text
from rankscope_trainer.settings import Settings
from tests import fork_server
from tests.trainer.whole_runs import losses_of_windows

SMALL = ["--layers", "2", "--width", "32", "--context", "32", "--data-bytes", "65536"]
SMALL += ["--timeout-seconds", "240", "--device", "cpu", "--log-every", "1000"]
WAIT_SECONDS = 280.0
PATIENCE_SECONDS = 120.0  # where no rank is stopped nothing waits for it


class RegroupingRun:
    """One job in one folder."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        *arguments: str,
        launcher: Sequence[str] = (),
        under: Sequence[str] = (),
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Start it; `under` is a command that starts the launcher, `launcher` are its options."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ranks = folder, ranks
        self.arguments = [*SMALL, *arguments, "--regroup-seconds", str(patience_seconds)]
        files = ["--losses", str(folder / "losses.jsonl"), "--samples", str(folder / "samples")]
        command = [*under, sys.executable, "-m", "rankscope_trainer.regroup"]
        command += ["--ranks", str(ranks), *launcher, "--", *self.arguments, *files]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **fork_server.under_torchrun()},
            )  # fmt: skip

    @property
    def settings(self) -> Settings:
        return load_settings([*self.arguments, "--regroup"], {}, self.ranks)

    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "samples"
        text = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in text if line.endswith("\n")]

    def trained(self) -> dict[int, int]:
        """Return the epoch in which each step was trained."""
        return {
            line["step"]: line["epoch"]
            for line in self.lines()
            if line.get("decision", "").startswith("train")
        }

    def last_step(self) -> int:
        return max(self.trained(), default=0)

    def ranks_now(self) -> list[int]:
        """Return the ranks that drew windows for the newest step as it was trained."""
        trained = self.trained()
        newest = max(trained.items(), default=(0, 0))
        return sorted(
            line["rank"]
            for line in self.lines()
            if "windows" in line and (line["step"], line["epoch"]) == newest
        )

    def until_ranks(self, *ranks: int) -> None:
        """Wait until a step was trained by these ranks alone."""
        self.until(lambda: self.ranks_now() == list(ranks))

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not what():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: self.last_step() >= step)

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the process that was a rank last."""
        os.kill([line["pid"] for line in self.lines() if line["rank"] == rank][-1], number)

    def finish(self) -> int:
        return self.process.wait(WAIT_SECONDS)

    def output(self) -> str:
        return (self.folder / "log").read_text()[-12000:]

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is not None:
            return
        victims = [*psutil.Process(self.process.pid).children(recursive=True), self.process]
        for victim in victims:
            try:
                victim.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)


ROUNDING = 2e-5  # of some hundred steps


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was trained, beside one process that trains all of it undisturbed."""

    missing_steps: list[int]
    lost_windows: int
    doubled_windows: int
    worst: float  # largest relative difference of a loss

    @property
    def is_whole(self) -> bool:
        return not (self.missing_steps or self.lost_windows or self.doubled_windows)

    @property
    def is_right(self) -> bool:
        return self.is_whole and self.worst <= ROUNDING


def compare(run: RegroupingRun) -> Comparison:
    """Compare each step with that of one process: its windows, and the mean of its losses."""
    torch.set_num_threads(1)
    settings, trained = run.settings, run.trained()
    by_step: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in run.lines():
        if "windows" in line:
            by_step.setdefault((line["step"], line["epoch"]), []).append(line)
    slices = _slices(settings)
    losses = losses_of_windows(settings, settings.global_batch)
    lost, doubled, worst = 0, 0, 0.0
    for step, epoch in sorted(trained.items()):
        own = by_step[step, epoch]
        drawn = [window for line in own for window in line["windows"]]
        lost += len(set(slices[step]) - set(drawn))
        doubled += len(drawn) - len(set(drawn))
        found = sum(float.fromhex(line["loss"]) * len(line["windows"]) for line in own) / len(drawn)
        right = sum(losses[step]) / len(losses[step])
        worst = max(worst, abs(found - right) / right)
    wanted = set(range(1, settings.steps + 1))
    return Comparison(sorted(wanted - trained.keys()), lost, doubled, worst)


def _slices(settings: Settings) -> dict[int, list[int]]:
    """Return the windows of each step, whoever draws them."""
    text = split_text(read_standard_library(settings.data_bytes), settings.validation_ratio)[0]
    windows = ByteWindows(text, settings.context)
    batches = Batches(windows, batch_size=settings.global_batch, seed=settings.seed)
    drawn = iter(batches)
    slices = {}
    for step in range(1, settings.steps + 1):
        next(drawn)
        slices[step] = batches.windows
    return slices
