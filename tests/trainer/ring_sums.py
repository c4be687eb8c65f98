"""Reduce known numbers by the ring, the tree and the library; write what came out and was sent.

Usage: torchrun ... ring_sums.py FOLDER
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rankscope_trainer.strategies.ring import padded_length, ring_all_reduce
from rankscope_trainer.strategies.tree import tree_all_reduce

LENGTH = 1001  # not a multiple of 2, 3 or 4


def numbers(rank: int, num_ranks: int, *, is_whole: bool) -> torch.Tensor:
    """Draw the padded gradient of one rank; sums of whole numbers are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.zeros(padded_length(LENGTH, num_ranks))
    drawn[:LENGTH] = torch.randn(LENGTH, generator=generator) * 1000
    return drawn.round() if is_whole else drawn


if __name__ == "__main__":
    # Beside this file, but a script that a launcher starts has no package to import it from.
    Counter = runpy.run_path(str(Path(__file__).with_name("counted_trainer.py")))["Counter"]
    folder = Path(sys.argv[1])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    counter = Counter()
    counter.install()
    sums = {}
    ways = {"ring": ring_all_reduce, "library": dist.all_reduce, "tree": tree_all_reduce}
    for is_whole in (True, False):
        for name, all_reduce in ways.items():
            flat = numbers(rank, num_ranks, is_whole=is_whole)
            counter.step += 1
            all_reduce(flat)
            sums[f"{name} {is_whole}"] = flat
    torch.save(sums, folder / f"sums-{rank}.pt")
    (folder / f"operations-{rank}.json").write_text(json.dumps(counter.by_step))
    dist.destroy_process_group()
