"""Makes and destroys a world and a subgroup many times; prints its memory at some of them."""

import os
import sys

import torch
import torch.distributed as dist


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(folder, times):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    memory = []
    for number in range(times):
        store = dist.FileStore(f"{folder}/store-{number}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        for _ in range(3):
            dist.all_reduce(torch.ones(10))
        group = dist.new_group(list(range(world)))
        dist.broadcast(torch.ones(5), 0, group=group)
        dist.destroy_process_group()
        memory.append(resident_bytes())
    with open(f"{folder}/memory.{rank}", "w") as file:
        file.write(f"{memory[times // 4]} {memory[-1]}")


main(sys.argv[1], int(sys.argv[2]))
