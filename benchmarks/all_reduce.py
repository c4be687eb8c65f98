"""How long an all_reduce takes by the trainer's ring, by its tree and by gloo, by size and ranks.

    python benchmarks/all_reduce.py
    python benchmarks/all_reduce.py --ranks 2,4,8 --kib 1,64,4096 --json

Ranks are processes of this machine, connected by gloo over loopback: delays and bytes cost what
they cost here, where ranks also share processors, so only the order of the three counts. The three
take turns within a round; shown are medians over rounds of the slowest rank, in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rankscope_trainer.strategies.ring import padded_length, ring_all_reduce
from rankscope_trainer.strategies.tree import tree_all_reduce
from tests.ports import free_port

WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "ring": ring_all_reduce, "tree": tree_all_reduce, "gloo": dist.all_reduce,
}  # fmt: skip
_NUMBERS_PER_KIB = 256
_SECONDS_PER_SIZE = 2.0
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200


def work(rank: int, num_ranks: int, port: int, sizes_kib: list[int], queue: object) -> None:
    """Measure as one rank; rank 0 hands in the rows."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    for kib in sizes_kib:
        flat = torch.ones(padded_length(kib * _NUMBERS_PER_KIB, num_ranks))
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        rounds = _LEAST_ROUNDS
        done = 0
        while done < rounds:
            for name, all_reduce in WAYS.items():
                flat.fill_(1.0)
                dist.barrier()
                began = time.perf_counter()
                all_reduce(flat)
                slowest = torch.tensor(time.perf_counter() - began)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times[name].append(float(slowest))
                if not bool((flat == num_ranks).all()):
                    raise SystemExit(f"{name} of {num_ranks} ranks is wrong")
            done += 1
            if done == _LEAST_ROUNDS:  # all ranks know the same times
                one = sum(statistics.median(of_one) for of_one in times.values())
                rounds = min(_MOST_ROUNDS, max(_LEAST_ROUNDS, int(_SECONDS_PER_SIZE / one)))
        if rank == 0:
            medians = {name: statistics.median(of_one) * 1e3 for name, of_one in times.items()}
            queue.put({"ranks": num_ranks, "kib": kib, "rounds": rounds, "ms": medians})  # type: ignore[attr-defined]
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print a table or lines of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", default="2,3,4,8")
    parser.add_argument("--kib", default="1,16,256,1024,4096,16384")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    options = parser.parse_args()
    sizes = [int(text) for text in options.kib.split(",")]
    context = processes.get_context("spawn")
    if not options.json:
        sys.stdout.write(f"{os.cpu_count()} cores, ms\n")
        sys.stdout.write("| ranks | KiB | ring | tree | gloo |\n|---|---|---|---|---|\n")
    for num_ranks in map(int, options.ranks.split(",")):
        queue = context.SimpleQueue()
        arguments = (num_ranks, free_port(), sizes, queue)
        processes.spawn(work, arguments, nprocs=num_ranks)
        for _ in sizes:
            row = queue.get()
            if options.json:
                sys.stdout.write(json.dumps({"cores": os.cpu_count(), **row}) + "\n")
                continue
            values = " | ".join(f"{row['ms'][name]:.2f}" for name in WAYS)
            sys.stdout.write(f"| {row['ranks']} | {row['kib']} | {values} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
