"""The real job in a drawn laboratory: torch over gloo, one process a node, with short time limits.

Torch is imported once; each node's process is a fork of this one that enters the node's
namespaces. What it does is what `preflight_job.py` does.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import resource
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.preflight.scene import Scene

LIMIT_S = 25.0  # of the store and of each collective; torch's own are 10 to 30 min
CUT_S = 2.5 * LIMIT_S
NUM_STEPS = 10
STEP_ELEMENTS = 1_000_000  # 4 MB of float32
SAMPLE_ELEMENTS = 24 * 1024 * 1024  # 96 MiB: one sample that passes through /dev/shm
Place = tuple[int, int]  # node, local rank
_SPACES = ("pid", "net", "uts", "mnt")
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
# What torchrun gives its workers, from what it is told itself.
_OF_TORCHRUN = {
    "PET_NNODES": "WORLD_SIZE", "PET_NODE_RANK": "RANK", "PET_MASTER_ADDR": "MASTER_ADDR",
    "PET_MASTER_PORT": "MASTER_PORT",
}  # fmt: skip


class Large(Dataset[torch.Tensor]):
    """Two samples that do not fit into a container's 64 MiB of /dev/shm."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(SAMPLE_ELEMENTS)


def run_job(scene: Scene, job: str = "") -> dict[str, Any]:
    """Run the job on all nodes of a scene; return what became of it."""
    started = time.monotonic()
    children = {
        (number, local): _start(scene, number, local, job)
        for number in scene.everywhere
        if number not in scene.missing
        for local in range(_num_local(scene, number))
    }
    exits: dict[Place, int] = {}
    while len(exits) < len(children) and time.monotonic() - started < CUT_S:
        for place, child in children.items():
            if place not in exits and os.waitpid(child, os.WNOHANG)[0]:
                exits[place] = 0
        time.sleep(0.1)
    for place, child in children.items():
        if place not in exits:
            os.kill(child, signal.SIGKILL)  # its child ends with the laboratory
            os.waitpid(child, 0)
    answers = {place: _read(scene, *place) for place in children}
    told = answers.values()
    has_worked = not scene.missing and all(one.get("done") for one in told)
    medians = [one["median_ms"] for one in told if "median_ms" in one]
    return {
        "worked": has_worked,
        "elapsed_s": round(time.monotonic() - started, 1),
        "worlds": sorted({one["world"] for one in told if "world" in one}),
        "median_ms": round(max(medians), 1) if medians else None,
        "nodes": {f"node{place[0]}": _said(exits, place, one) for place, one in answers.items()},
    }


def _num_local(scene: Scene, number: int) -> int:
    given = scene.lab.env[number]
    return int(given.get("PET_NPROC_PER_NODE") or given.get("LOCAL_WORLD_SIZE") or 1)


def _said(exits: dict[Place, int], place: Place, told: dict[str, Any]) -> str:
    if told.get("done"):
        return "done"
    return str(told.get("error") or ("ended" if place in exits else "hangs"))


def _read(scene: Scene, number: int, local: int) -> dict[str, Any]:
    path = _answer(scene, number, local)
    told: dict[str, Any] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        told.update(json.loads(line))
    return told


def _answer(scene: Scene, number: int, local: int) -> Path:
    return scene.answers / f"job{number}-{local}.jsonl"


def _start(scene: Scene, number: int, local: int, job: str) -> int:
    answer, shared = _answer(scene, number, local), scene.shared
    answer.unlink(missing_ok=True)
    descriptor = os.open(answer, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    environment = _environment(scene, number, local)
    child = os.fork()
    if child:
        os.close(descriptor)
        return child
    try:
        _enter(scene.lab.hosts[number].pid)
        inner = os.fork()  # only children are in the other process namespace
        if inner:
            os.waitpid(inner, 0)
        else:
            _limit(scene.limits.get(number, ""))
            os.environ.clear()
            os.environ.update(environment)
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
            _work(descriptor, job, shared)
    finally:
        os._exit(0)


def _environment(scene: Scene, number: int, local: int) -> dict[str, str]:
    given = scene.lab.environment(number)
    num_local = _num_local(scene, number)
    if scene.mode != "env":
        given.setdefault("PET_NODE_RANK", "0")
        given |= {new: given[old] for old, new in _OF_TORCHRUN.items() if old in given}
        given["WORLD_SIZE"] = str(int(given["WORLD_SIZE"]) * num_local)
        given["RANK"] = str(int(given["RANK"]) * num_local)
    if local:
        given["RANK"] = str(int(given["RANK"]) + local)
    return given


def _enter(pid: int) -> None:
    for space in _SPACES:
        descriptor = os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY)
        _setns(descriptor)
        os.close(descriptor)


def _setns(descriptor: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _limit(options: str) -> None:
    for option in options.split():
        name, _, values = option.removeprefix("--").partition("=")
        soft, _, hard = values.partition(":")
        resource.setrlimit(_LIMITS[name], (int(soft), int(hard or soft)))


def _work(descriptor: int, job: str, shared: Path) -> None:
    def tell(**what: Any) -> None:
        os.write(descriptor, (json.dumps(what) + "\n").encode())

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        _train(tell, job, shared)
        tell(done=True)
    except BaseException as error:  # noqa: BLE001  (whatever it is, it is the answer)
        last = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        tell(error=last[:300])


def _cache(variable: str) -> Path:
    """Return where what is downloaded goes, as torch.hub and huggingface_hub have it."""
    if variable != "HOME":
        return Path(os.environ[variable])
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ['HOME']}/.cache"
    return Path(os.environ.get("TORCH_HOME") or f"{cache}/torch")


def _train(tell: Any, job: str, shared: Path) -> None:
    name, _, detail = job.partition(":")
    if name == "cache":
        place = _cache(detail) / "hub"
        place.mkdir(parents=True, exist_ok=True)
        (place / "model.bin").write_bytes(b"weights")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=LIMIT_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    one = torch.ones(1)
    dist.all_reduce(one)
    tell(world=world_size)
    if name == "loader":
        for sample in DataLoader(Large(), batch_size=1, num_workers=1, timeout=LIMIT_S):
            one += sample.flatten()[0]
    gradient, durations = torch.ones(STEP_ELEMENTS), []
    dist.broadcast(gradient, src=0)  # as DDP does first
    pieces = torch.ones(STEP_ELEMENTS // world_size * world_size)
    for _ in range(NUM_STEPS):
        started = time.monotonic()
        dist.all_reduce(gradient)
        gradient /= world_size
        # Of experts, or of sequences in parallel: the only one that uses all pairs both ways.
        dist.all_to_all_single(torch.empty_like(pieces), pieces)
        durations.append(time.monotonic() - started)
    tell(median_ms=statistics.median(durations) * 1e3)
    if name == "checkpoint":
        torch.save(gradient, shared / f"rank{rank}.pt")
        dist.barrier()
        for peer in range(world_size):
            torch.load(shared / f"rank{peer}.pt")
    dist.barrier()
    if rank:
        dist.destroy_process_group()
        return
    time.sleep(1)  # the store is here: the others leave first
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(__doc__)
