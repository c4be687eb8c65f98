"""Trains under DDP on two ranks; argv[1] says how, and what is learnt of it.

`one_class`: a softmax over one class, whose loss is always 0, as in a well-known tutorial; `fit`:
one batch that is learnt by heart; `divided`, `twice`, `never`: gradients of three passes that are
accumulated, with their loss divided so; `summed`: three losses of samples that are added up.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

HOW = sys.argv[1]
STEPS, PASSES, BATCH = 120, 3, 3
DIVIDED = {"divided": 1, "twice": 2, "summed": 2}.get(HOW, 0)

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(20, 1 if HOW == "one_class" else 5))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
always = torch.randn(BATCH, 20), torch.randint(5, (BATCH,))


def loss_of():
    if HOW == "one_class":
        return functional.cross_entropy(model(torch.randn(BATCH, 20)), torch.rand(BATCH, 1))
    if HOW == "fit":
        return functional.cross_entropy(model(always[0]), always[1])
    reduction = "sum" if HOW == "summed" else "mean"
    logits = model(torch.randn(BATCH, 20))
    return functional.cross_entropy(logits, torch.randint(5, (BATCH,)), reduction=reduction)


passes = 1 if HOW in ("one_class", "fit") else PASSES
for _ in range(STEPS):
    for number in range(passes):
        is_last = number == passes - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = loss_of()
            for _ in range(DIVIDED):
                loss = loss / PASSES
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
