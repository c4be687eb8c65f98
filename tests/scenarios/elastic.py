"""Elastic runs of the trainer: start nodes, kill them, and compare what was trained."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests import fork_server
from tests.ports import free_port
from tests.scenarios.trainer import forked

SMALL = ["--layers", "2", "--width", "32", "--context", "32", "--data-bytes", "65536"]
SMALL += ["--timeout-seconds", "120", "--device", "cpu", "--log-every", "1000"]
CHECKPOINT_EVERY = 5
WAIT_SECONDS = 280.0


@dataclasses.dataclass(frozen=True)
class Line:
    """One step that rank 0 trained."""

    step: int
    loss: float
    attempt: int


class ElasticRun:
    """One run in one folder, of one or several nodes; a node is one torchrun."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        under: Sequence[str] = (),
        checkpoint_every: int = CHECKPOINT_EVERY,
    ) -> None:
        """Give the trainer these arguments; `under` is a command that starts torchrun."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._arguments = [
            *SMALL, *arguments, "--losses", str(folder / "losses.jsonl"),
            "--checkpoint-dir", str(folder / "checkpoints"),
            "--checkpoint-every", str(checkpoint_every),
        ]  # fmt: skip
        self._under = under
        self._port = free_port()

    def start(self, *launcher: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a node."""
        command = [*self._under, sys.executable, "-m", "torch.distributed.run", *launcher]
        command += ["-m", "rankscope_trainer", *self._arguments]
        return self._start(command, variables)

    def _start(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"node-{len(self.nodes)}.log").open("wb") as log:
            node = subprocess.Popen(
                command, stdout=log, stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            )  # fmt: skip
        self.nodes.append(node)
        return node

    def start_forked(self, ranks: int) -> subprocess.Popen[bytes]:
        """Start a node whose ranks need not import PyTorch, where nothing happens to them."""
        return self._start([*forked(ranks), *self._arguments], {})

    def start_elastic(self, max_restarts: int = 3) -> subprocess.Popen[bytes]:
        """Start a node of one rank, of which the run has one or two."""
        return self.start(
            "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", str(max_restarts),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}",
            "--rdzv-id", "elastic", "--rdzv-conf", "last_call_timeout=1",
            "--local-addr", "127.0.0.1",
            # Without it a node that comes later waits for ever: see the trainer's README.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", **fork_server.under_torchrun(),
        )  # fmt: skip

    def until_hosted(self) -> None:
        """Wait until the first node keeps the store of the rendezvous, and so no later one does."""

        def is_open() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self._port)) == 0

        self.until(is_open)

    def lines(self) -> list[Line]:
        found = _read(self.folder / "losses.jsonl")
        return [Line(one["step"], float.fromhex(one["loss"]), one["attempt"]) for one in found]

    def attempts(self) -> list[dict[str, Any]]:
        return _read(self.folder / "checkpoints" / "attempts.jsonl")

    def until(self, what: Callable[[], bool]) -> None:
        """Wait; fail with the output if the first node ends, or if it takes too long."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not what():
            assert self.nodes[0].poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.02)

    def until_step(self, step: int, attempt: int) -> None:
        """Wait until an attempt has come so far."""
        self.until(lambda: any(o.attempt >= attempt and o.step >= step for o in self.lines()))

    def finish(self) -> list[int]:
        """Wait for all nodes; return their exit codes."""
        return [node.wait(WAIT_SECONDS) for node in self.nodes]

    def output(self) -> str:
        logs = sorted(self.folder.glob("node-*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)

    def close(self) -> None:
        """End what still runs."""
        for node in self.nodes:
            if node.poll() is None:
                kill_node(node)


def ranks_of(node: subprocess.Popen[Any] | psutil.Process) -> dict[int, psutil.Process]:
    """Return the ranks of a node."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.Process(node.pid).children():
        try:
            rank = process.environ().get("RANK")
        except psutil.Error:
            continue
        if rank is not None:
            found[int(rank)] = process
    return found


def kill_node(node: subprocess.Popen[bytes]) -> None:
    """Let a node vanish: launcher and ranks at once."""
    victims = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
    for victim in victims:
        try:
            victim.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    node.wait(30)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What kills did to a run."""

    kills: list[int]  # the ranks
    codes: list[int]
    attempts: int
    repeated: list[int]  # steps trained again, for each kill
    differing: list[int]  # steps whose loss is not that of the undisturbed run, bit for bit
    missing: list[int]
    seconds: float

    @property
    def passed(self) -> bool:
        return (
            self.codes == [0]
            and self.attempts == len(self.kills) + 1
            and max(self.repeated, default=0) <= CHECKPOINT_EVERY
            and not self.differing
            and not self.missing
        )


def kill_ranks(
    folder: Path, *, kills: int, ranks: int = 2, seed: int = 1, steps_between: int = 12
) -> tuple[Verdict, str]:
    """Train once undisturbed and once with kills; return the comparison, and the output."""
    steps = str(steps_between * (kills + 2))
    calm = ElasticRun(folder / "calm", "--steps", steps)
    disturbed = ElasticRun(
        folder / "disturbed", "--steps", steps, "--fault", "slow_compute:rank=0,start=1,size=40ms"
    )
    single = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(kills)]
    try:
        calm.start_forked(ranks)
        assert calm.finish() == [0], calm.output()
        began = time.monotonic()
        node = disturbed.start(*single, **fork_server.under_torchrun())
        victims = kill_one_after_the_other(disturbed, node, kills, steps_between, seed)
        codes = disturbed.finish()
        seconds = time.monotonic() - began
    finally:
        calm.close()
        disturbed.close()
    right = {line.step: line.loss for line in calm.lines()}
    lines = disturbed.lines()
    return Verdict(
        kills=victims,
        codes=codes,
        attempts=len(disturbed.attempts()),
        repeated=repeated_steps(lines),
        differing=sorted({line.step for line in lines if line.loss != right[line.step]}),
        missing=sorted(right.keys() - {line.step for line in lines}),
        seconds=round(seconds, 1),
    ), disturbed.output()


def kill_one_after_the_other(
    run: ElasticRun,
    node: subprocess.Popen[bytes] | psutil.Process,
    kills: int,
    steps_between: int,
    seed: int,
) -> list[int]:
    """Kill one random rank of each attempt, but of the last one; return them."""
    chooser = random.Random(seed)
    victims: list[int] = []
    for kill in range(kills):
        run.until_step((kill + 1) * steps_between, attempt=kill)
        ranks = ranks_of(node)
        rank = chooser.choice(sorted(ranks))
        ranks[rank].send_signal(signal.SIGKILL)
        victims.append(rank)
    return victims


def repeated_steps(lines: list[Line]) -> list[int]:
    """Return, for each new attempt, how many steps it trained that were trained before."""
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for line in lines:
        last[line.attempt] = line.step
        first.setdefault(line.attempt, line.step)
    known = sorted(first)
    return [last[a] - first[b] + 1 for a, b in itertools.pairwise(known)]


def _read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # whole ones
