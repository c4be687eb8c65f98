"""Four threads on each of two ranks make synchronous collectives at once, each in its own group."""

import sys
import threading
import time

import torch
import torch.distributed as dist

THREADS, TIMES = 4, int(sys.argv[1])
dist.init_process_group("gloo")
groups = [dist.new_group() for _ in range(THREADS)]


def reduce(group: dist.ProcessGroup) -> None:
    for _ in range(TIMES):
        ones = torch.ones(4)
        dist.all_reduce(ones, group=group)
        assert ones[0] == 2


sys.setswitchinterval(1e-5)  # as often in between as possible
threads = [threading.Thread(target=reduce, args=(group,)) for group in groups]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
dist.destroy_process_group()
time.sleep(0.1)
