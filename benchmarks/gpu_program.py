"""A training script as users write them, DDP on one GPU that all ranks share; see `gpu.py`.

    torchrun ... gpu_program.py --seconds 60 [--fault gpu --rank 1 --after 15] [--losses FILE]

NCCL refuses two ranks on one GPU of one host. Each rank here says that it is on a host of its own
(NCCL_HOSTID), so NCCL connects them by sockets, as it does between nodes. Without a GPU the ranks
train on the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, ROWS = 1024, 8, 2048
SLOW_S = 0.06
GPU_CYCLES = int(SLOW_S * 1.7e9)  # of torch.cuda._sleep: about as long on an H100 or H200
HANG_LIMIT = datetime.timedelta(seconds=25)
FAULTS = ("none", "gpu", "host", "hang", "crash", "kill")


class Net(nn.Module):
    """Layers of one width, and the fault of this rank in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.fault = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        suffer(self.fault)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def suffer(fault: str) -> None:
    if fault == "gpu" and torch.cuda.is_available():
        torch.cuda._sleep(GPU_CYCLES)
    elif fault in ("host", "gpu"):
        time.sleep(SLOW_S)
    elif fault == "hang":
        time.sleep(10_000)
    elif fault == "crash":
        raise ValueError("the batch of this rank is empty")
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--after", type=float, default=15.0, help="seconds")
    parser.add_argument("--read-every", type=int, default=1, help="steps between loss.item()")
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--times", type=Path, help="seconds of each step, for the first rank")
    return parser.parse_args()


def train(arguments: argparse.Namespace, rank: int, device: torch.device) -> tuple[list[str], ...]:
    """Return the losses and the seconds of the steps, as texts."""
    net = Net().to(device)
    model = DistributedDataParallel(net, device_ids=[0] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses: list[str] = []
    times: list[str] = []
    is_over = torch.zeros((), device=device)
    began = time.monotonic()
    for step in range(1, arguments.steps + 1):
        at = time.monotonic()
        if rank == arguments.rank and at - began > arguments.after:
            net.fault = arguments.fault
        x = torch.randn(ROWS if device.type == "cuda" else 16, WIDTH).to(device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % arguments.read_every == 0:
            losses.append(loss.item().hex())
        times.append(f"{time.monotonic() - at:.6f}")
        if step % 50 == 0:  # they end together
            is_over.fill_(time.monotonic() - began > arguments.seconds)
            dist.all_reduce(is_over, op=dist.ReduceOp.MAX)
            if is_over.item():
                break
    return losses, times


def main() -> None:
    arguments, rank = arguments_of(), int(os.environ["RANK"])
    is_cuda = torch.cuda.is_available()
    os.environ.setdefault("NCCL_HOSTID", f"host-{rank}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=HANG_LIMIT)
    torch.manual_seed(rank)
    losses, times = train(arguments, rank, torch.device("cuda:0" if is_cuda else "cpu"))
    if arguments.losses:
        arguments.losses.with_suffix(f".{rank}").write_text("\n".join(losses))
    if arguments.times and rank == 0:
        arguments.times.write_text("\n".join(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
