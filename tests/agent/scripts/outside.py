"""Ranks whose kernels leave the dispatcher for thinned steps. Prints a line for what was asked.

outside.py losses N         N steps of DDP with two groups; the level is set by hand, 0 never
outside.py hang FILE        the last rank waits for FILE before a collective of a thinned step
"""

import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankscope.rank.attach import start

LEVEL = 3  # one step in four is whole


def say(**fields):
    os.write(1, json.dumps({"rank": rank, **fields}).encode() + b"\n")


def is_in():
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def counter(group):
    return group._get_sequence_number_for_group()


def train(step, pairs):
    """One step: DDP's buckets, a scalar in each of two groups."""
    optimizer.zero_grad()
    loss = model(torch.full((4, 6), step / 20)).square().mean()
    loss.backward()
    value = loss.detach().clone()
    dist.all_reduce(value)
    for group in pairs:
        dist.all_reduce(value, group=group, async_op=True).wait()
    optimizer.step()
    return value.item().hex()


def losses(num_steps, level):
    pairs = [dist.new_group([0, 1])]
    rare = dist.new_group([0, 1])
    seen, found = [], []
    for step in range(1, num_steps + 1):
        if step == 4 and level:
            agent.thin(level)
        if step == 14:  # thinned: a group is made, and one is used that no whole step uses
            dist.all_reduce(torch.ones(1), group=rare)
            pairs.append(dist.new_group([0, 1]))
            seen.append(is_in())
        found.append(train(step, pairs))
        seen.append(is_in())
    say(losses=found, is_in=seen, counters=[counter(g) for g in (dist.group.WORLD, *pairs, rare)],
        source=agent.context.sources.get("collectives/thinned steps") if agent else "")  # fmt: skip


def thread():
    """A thread of rank 0 is inside torch.distributed while steps begin."""
    agent.thin(LEVEL)
    other = dist.new_group([0, 1])
    for step in range(1, 7):
        train(step, [])
    before = is_in()
    waits = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=other))
    if rank == 0:
        waits.start()
        time.sleep(0.2)
    inside = []
    for step in range(7, 14):  # 8 and 12 should be whole
        train(step, [])
        inside.append(is_in())
    num_unsafe = agent.context.outside.num_unsafe
    if rank == 0:
        waits.join()
    else:
        dist.all_reduce(torch.ones(1), group=other)
    after = []
    for step in range(14, 22):
        train(step, [])
        after.append(is_in())
    say(before=before, inside=inside, after=after, num_unsafe=num_unsafe)


def p2p():
    """Whole steps carry no point-to-point, a thinned one does."""
    agent.thin(LEVEL)
    seen = []
    for step in range(1, 19):
        train(step, [])
        if step == 10:
            dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)
        dist.monitored_barrier()  # moves the counter too
        seen.append(is_in())
    say(is_in=seen, stays=agent.context.outside.stays)


def hang():
    agent.thin(LEVEL)
    for step in range(1, 11):
        train(step, [])
        time.sleep(0.05)
    say(is_in=is_in(), step=agent.context.recorder.step)
    dist.barrier()
    if rank == dist.get_world_size() - 1:
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.1)
    dist.all_reduce(torch.ones(1))
    for step in range(11, 90):
        train(step, [])
        time.sleep(0.05)


def fork():
    agent.thin(LEVEL)
    for step in range(1, 11):
        train(step, [])
    before = is_in()
    child = os.fork()
    if child == 0:
        assert agent.context.outside._standing._thread is None
        os._exit(7)
    _, status = os.waitpid(child, 0)
    train(11, [])
    say(before=before, code=os.waitstatus_to_exitcode(status))
    agent.switch_off()
    train(12, [])
    agent.switch_on(is_alone=False)
    train(13, [])


dist.init_process_group("gloo")
rank = dist.get_rank()
agent = start.agent()
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
what = sys.argv[1]
if what == "losses":
    losses(int(sys.argv[2]), LEVEL if agent else 0)
else:
    {"thread": thread, "p2p": p2p, "hang": hang, "fork": fork}[what]()
dist.destroy_process_group()
