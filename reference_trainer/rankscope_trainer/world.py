"""Which rank this process is, and how it joins the others."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rankscope_trainer.errors import SettingError
from rankscope_trainer.fresh_store import fresh_store

_LAST_RETURN_SECONDS = 0.1  # for the last thread to take the interpreter lock and give it back


@dataclasses.dataclass(frozen=True)
class World:
    """This rank's place in the job."""

    rank: int
    world_size: int
    device: torch.device
    restarts: int = 0  # how often the agent of this node has restarted its ranks after a failure


def join_world(*, device: str, timeout_seconds: float) -> World:
    """Join the default process group: torchrun's if it started us, else one of a single rank."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = choose_device(device, local_rank)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun's, for all attempts
        shared, rank, world_size = next(rendezvous("env://", timeout=timeout))
        store = fresh_store(
            shared, rank=rank, world_size=world_size, timeout_seconds=timeout_seconds
        )
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=world_size
        )
    elif "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not declared so
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return World(dist.get_rank(), dist.get_world_size(), chosen, restarts)


def leave_world() -> None:
    """Leave the default process group, and let its threads end before the interpreter does.

    A gloo thread that holds the last reference to the group ends it from inside, which aborts the
    process, as PowerSGD's callbacks did; so does one that lets go of a Python object while the
    interpreter ends (https://github.com/pytorch/pytorch/pull/179291).
    """
    time.sleep(_LAST_RETURN_SECONDS)
    dist.destroy_process_group()
    time.sleep(_LAST_RETURN_SECONDS)


def choose_device(device: str, local_rank: int) -> torch.device:
    """Return where a local rank computes. Raises SettingError where GPUs are missing."""
    num_gpus = torch.cuda.device_count()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device == "cuda" and num_gpus < local_world_size:
        raise SettingError(
            "device",
            f"{local_world_size} ranks on this machine need as many GPUs, there are {num_gpus}",
            "Start fewer ranks, or choose cpu",
        )
    if device == "cpu" or num_gpus < local_world_size:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)
