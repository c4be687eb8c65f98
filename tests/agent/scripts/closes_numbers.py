"""Trains, closes all descriptors from 3 up as daemons do, and writes files of its own."""

import logging
import os
import pathlib
import signal
import sys

import torch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train() -> None:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()


train()
os.closerange(3, 256)
files = [open(pathlib.Path(sys.argv[1]) / f"user{number}", "wb") for number in range(8)]
logging.warning("hello from the user")
train()
train()
os.kill(os.getpid(), signal.SIGRTMIN + 5)  # as the collector asks for stacks
for file in files:
    file.write(b"weights")
    file.close()
