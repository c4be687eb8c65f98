"""Start the trainer, small enough for a test: under torchrun, or by the fork server."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fork_server import server

COUNTED_TRAINER = Path(__file__).with_name("counted_trainer.py")
RECORDED_TRAINER = Path(__file__).with_name("recorded_trainer.py")
SMALL = ["--layers", "4", "--width", "32", "--context", "32", "--data-bytes", "65536"]
SMALL += ["--timeout-seconds", "60", "--device", "cpu"]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that ended: its exit code, all it wrote, and its folder."""

    code: int
    output: str
    folder: Path
    arguments: list[str]

    def losses(self) -> dict[int, float]:
        lines = (self.folder / "losses.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        return {line["step"]: float.fromhex(line["loss"]) for line in steps}

    def manifest(self) -> list[dict[str, Any]]:
        return read_manifest(self.folder)

    def record(self, rank: int) -> dict[int, dict[str, Any]]:
        """Return what `recorded_trainer.py` wrote: by step, sums and states in one."""
        document = json.loads((self.folder / f"record-{rank}.json").read_text())
        return {
            int(step): {**state, **document["sums"].get(step, {})}
            for step, state in document["states"].items()
        }

    def operations(self, rank: int) -> dict[int, list[tuple[str, int]]]:
        document = json.loads((self.folder / f"operations-{rank}.json").read_text())
        return {
            int(step): [(operation, size) for operation, size in operations]
            for step, operations in document.items()
        }


def read_manifest(folder: Path) -> list[dict[str, Any]]:
    path = folder / "manifest.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(
    folder: Path, ranks: int, arguments: list[str], program: Path = COUNTED_TRAINER
) -> subprocess.Popen[str]:
    """Start a run under torchrun; all its files go into `folder`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), str(program)]
    return subprocess.Popen(
        [*command, *_arguments(folder, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def launched(folder: Path, ranks: int, *arguments: str) -> Finished:
    """Run to the end under torchrun."""
    with start(folder, ranks, list(arguments)) as process:
        output, _ = process.communicate(timeout=300)
    return Finished(process.returncode, output, folder, [*SMALL, *arguments])


def run(folder: Path, ranks: int, *arguments: str, program: Path = COUNTED_TRAINER) -> Finished:
    """Run to the end, with ranks that need not import PyTorch first."""
    words = _arguments(folder, list(arguments))
    output = folder / "output.txt"
    output.unlink(missing_ok=True)
    code = server().run(program, ranks, words, output)
    return Finished(code, output.read_text(), folder, [*SMALL, *arguments])


def with_checkpoints(folder: Path, arguments: str, *, steps: int, every: int) -> list[str]:
    """Return the arguments of a run that writes checkpoints into a folder of `folder`."""
    saves = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", str(every)]
    return [*arguments.split(), *saves, "--steps", str(steps)]


def _arguments(folder: Path, arguments: list[str]) -> list[str]:
    folder.mkdir(exist_ok=True)
    files = ["--losses", str(folder / "losses.jsonl")]
    files += ["--fault-manifest", str(folder / "manifest.jsonl")]
    return [str(folder), *SMALL, *arguments, *files]
