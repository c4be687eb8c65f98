"""Starts the reference trainer under torchrun, attached or not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.agent import recorded


def command(ranks: int, *arguments: str) -> list[str]:
    """Return the command line that a user would type."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "-m", "rankscope_trainer", *arguments,
    ]  # fmt: skip


def train(directory: Path, ranks: int, *arguments: str, attached: bool = True) -> None:
    """Run the trainer to its end. Raises AssertionError with its output if it fails."""
    done = subprocess.run(
        command(ranks, *arguments),
        env=recorded.environment(directory, RANKSCOPE="1" if attached else "0"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rankscope:" not in done.stderr
