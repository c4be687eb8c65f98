"""A small training program over gloo: what the faults of the preflight laboratory are tried on.

    torchrun ... benchmarks/preflight_job.py [--loader] [--checkpoint DIR]

It meets, reduces one number, then makes steps of a 4 MB all-reduce, as DDP's buckets would.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

NUM_STEPS = 10
STEP_ELEMENTS = 1_000_000  # 4 MB of float32
SAMPLE_ELEMENTS = 24 * 1024 * 1024  # 96 MiB: one sample that passes through /dev/shm


class Large(Dataset[torch.Tensor]):
    """Two samples that do not fit into a container's 64 MiB of /dev/shm."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= len(self):
            raise IndexError(index)
        return torch.ones(SAMPLE_ELEMENTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loader", action="store_true")
    parser.add_argument("--checkpoint", default="")
    chosen = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    one = torch.ones(1)
    dist.all_reduce(one)
    print(f"JOB rank {rank} of {world_size} (WORLD_SIZE={os.environ['WORLD_SIZE']})", flush=True)
    if chosen.loader:
        for sample in DataLoader(Large(), batch_size=1, num_workers=1):
            one += sample.flatten()[0]
    gradient = torch.ones(STEP_ELEMENTS)
    durations = []
    for _ in range(NUM_STEPS):
        started = time.monotonic()
        dist.all_reduce(gradient)
        gradient /= world_size
        durations.append(time.monotonic() - started)
    median_ms = sorted(durations)[len(durations) // 2] * 1e3
    print(f"JOB rank {rank} steps {len(durations)} median {median_ms:.1f} ms", flush=True)
    if chosen.checkpoint:
        torch.save(gradient, os.path.join(chosen.checkpoint, f"rank{rank}.pt"))
        dist.barrier()
        for peer in range(world_size):
            torch.load(os.path.join(chosen.checkpoint, f"rank{peer}.pt"))
    dist.destroy_process_group()
    print(f"JOB rank {rank} done", flush=True)


if __name__ == "__main__":
    main()
