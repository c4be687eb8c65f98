"""Prints whom torch's warnings name: what calls the function that warns."""

import sys
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset


class Longer(IterableDataset):
    def __len__(self):
        return 1

    def __iter__(self):
        return iter(range(3))


def show(message, category, filename, lineno, file=None, line=None):
    sys.stdout.write(f"{Path(filename).name}:{lineno} {str(message)[:40]!r}\n")


def warn():
    warnings.warn("from a wrapped function", stacklevel=2)
    return []


warnings.showwarning = show
warnings.simplefilter("always")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scheduler.step()
loader = DataLoader(Longer())
assert len(loader) == 1
for _ in loader:
    pass
model(torch.zeros(1, 2)).sum().backward()
optimizer.step(warn)
torch.autograd.backward(model(torch.zeros(1, 2)).sum(), grad_variables=torch.tensor(1.0))
