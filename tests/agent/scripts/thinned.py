"""Two ranks do the same three times: recorded, thinned, recorded. Prints what they saw."""

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.files import ring
from rankscope.rank.attach import start
from rankscope.rank.recorder import MEASURE_EVERY

LATE_SECONDS = 0.4
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(6, 5))
header = start.context().recorder.buffer


def u64(at):
    return ring.U64.unpack_from(header, at)[0]


def work():
    x = torch.ones(1000)
    dist.all_reduce(x)
    if rank == 1:
        time.sleep(LATE_SECONDS)  # rank 0 waits for it
    dist.all_reduce(x, async_op=True).wait()
    loss = model(torch.ones(3, 6)).sum()
    # called at the end of the pass, when the agent has not yet asked who called last
    queue = torch.autograd.Variable._execution_engine.queue_callback
    loss.register_hook(lambda _: queue(lambda: by_engine.append(u64(ring.ENGINE_NUMBER_AT) - 1)))
    loss.backward()
    for _ in range(MEASURE_EVERY):
        dist.all_reduce(x)


by_engine = []
for _ in range(2):  # DDP orders its buckets anew in the second pass, by a broadcast
    work()
for thinned in (0, 1, 0):
    dist.barrier()
    header[ring.THINNED_AT] = thinned
    first, blocked = u64(ring.HEAD_AT), u64(ring.BLOCKED_AT)
    measured = u64(ring.OWN_CALLS_AT), u64(ring.OWN_THINNED_CALLS_AT)
    work()
    line = {
        "rank": rank,
        "thinned": thinned,
        "numbers": [first, u64(ring.HEAD_AT)],
        "blocked_ns": u64(ring.BLOCKED_AT) - blocked,
        "by_engine": by_engine[-1],
        "measured": [
            u64(ring.OWN_CALLS_AT) - measured[0],
            u64(ring.OWN_THINNED_CALLS_AT) - measured[1],
        ],
    }
    os.write(1, json.dumps(line).encode() + b"\n")  # whole lines, also from two ranks at once
dist.destroy_process_group()
