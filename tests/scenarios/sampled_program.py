"""Trains a small model under DDP as tutorials do; argv[1] says on which samples.

`sampler`: right; `forgotten`: without a sampler; `epoch`: set_epoch is not called; `stream`: a data
set that shares itself out; `sequence`: all ranks draw the same, and each learns from its part of
the sequence; `validated`: right, with a validation on all samples after each epoch; `by_hand`:
batches drawn without a loader, by the same seed on all ranks.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

HOW = sys.argv[1]
EPOCHS, BATCH, SAMPLES, WIDTH = 3, 4, 128, 16


class Shares(IterableDataset):
    def __iter__(self):
        return iter(zip(inputs[rank::size], targets[rank::size], strict=True))


dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inputs = torch.randn(SAMPLES, WIDTH)
targets = inputs.sum(1, keepdim=True).sin()
samples = TensorDataset(inputs, targets)
model = DistributedDataParallel(torch.nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = None
if HOW == "stream":
    loader = DataLoader(Shares(), batch_size=BATCH)
elif HOW in ("forgotten", "sequence"):
    loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
else:
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=BATCH, sampler=sampler)


def learn(x, y):
    if HOW == "sequence":  # each its own part of every sample
        mask = torch.zeros(WIDTH)
        mask[rank::size] = 1
        x = x * mask
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for epoch in range(EPOCHS):
    if HOW == "by_hand":
        for _ in range(SAMPLES // BATCH):
            chosen = torch.randint(SAMPLES, (BATCH,))
            learn(inputs[chosen], targets[chosen])
        continue
    if sampler is not None and HOW != "epoch":
        sampler.set_epoch(epoch)
    for x, y in loader:
        learn(x, y)
    if HOW == "validated":
        model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(samples, batch_size=BATCH):
                model(x)
        model.train()
dist.destroy_process_group()
