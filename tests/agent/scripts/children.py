"""Trains alone with loader workers, forks, runs a child: only this process may record."""

import os
import subprocess
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((8,), float(index))


def main():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    context = sys.argv[1]
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=context)
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    subprocess.run(
        [sys.executable, "-c", "import torch; o = torch.optim.SGD([torch.ones(1)], 1.0); o.step()"],
        check=True,
    )
    pid = os.fork()
    if pid == 0:
        optimizer.step()
        os._exit(0)
    os.waitpid(pid, 0)
    if len(sys.argv) > 2:
        os._exit(int(sys.argv[2]))


if __name__ == "__main__":
    main()
