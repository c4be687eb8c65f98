"""Starts the reference trainer, attached or not."""

from __future__ import annotations

import sys
from pathlib import Path

import rankscope_trainer
from tests import fork_server
from tests.agent import recorded

_TRAINER = Path(rankscope_trainer.__file__).with_name("__main__.py")


def command(ranks: int, *arguments: str) -> list[str]:
    """Return the command line that a user would type."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(ranks), "-m", "rankscope_trainer", *arguments,
    ]  # fmt: skip


def forked(ranks: int, *arguments: str) -> list[str]:
    """Return a command for the same run whose ranks need not import PyTorch."""
    return [*fork_server.launcher(ranks), str(_TRAINER), *arguments]


def train(directory: Path, ranks: int, *arguments: str, attached: bool = True) -> None:
    """Run the trainer to its end. Raises AssertionError with its output if it fails."""
    said = "1" if attached else "0"
    done = recorded.run(directory, _TRAINER, *arguments, ranks=ranks, RANKSCOPE=said)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rankscope:" not in done.stderr
