"""A training script as users write them, on one GPU that all ranks share; see `gpu.py`.

    torchrun ... gpu_program.py --seconds 60 [--model fsdp] [--fault gpu --rank 1 --after 15]

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
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, ROWS, MICROBATCHES = 1024, 8, 2048, 4
SLOW_S = 0.06
GPU_CYCLES = int(SLOW_S * 1.7e9)  # of torch.cuda._sleep: about as long on an H100 or H200
HANG_LIMIT = datetime.timedelta(seconds=25)
FAULTS = ("none", "gpu", "host", "hang", "crash", "kill")
MODELS = ("ddp", "buffers", "manual", "asynchronous", "fsdp", "pipeline")


class Net(nn.Module):
    """Layers of one width, and the fault of this rank in each forward."""

    def __init__(self, num_layers: int, has_buffers: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(WIDTH) if has_buffers else nn.Identity() for _ in range(num_layers)
        )
        self.fault = "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        suffer(self.fault)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        return x


def backward_of(
    model: str, net: Net, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what runs forward and backward on a batch and returns the loss, not read yet."""
    if model == "pipeline":
        return Pipeline(net, device)
    forward: Callable[[torch.Tensor], torch.Tensor] = net
    if model == "fsdp":
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    elif model in ("ddp", "buffers"):
        forward = DistributedDataParallel(net, device_ids=[0] if device.type == "cuda" else None)

    def run(x: torch.Tensor) -> torch.Tensor:
        loss = (forward(x) - x).square().mean()
        loss.backward()
        if model == "manual":
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
        elif model == "asynchronous":
            works = [dist.all_reduce(one.grad, async_op=True) for one in net.parameters()]
            for work in works:
                work.wait()
        return loss.detach()

    return run


class Pipeline:
    """This rank's stage: all microbatches forward, then all backward."""

    def __init__(self, net: Net, device: torch.device) -> None:
        self.net, self.device = net, device
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts, outputs = [], []
        for part in x.chunk(MICROBATCHES):
            if self.rank:
                part = torch.empty_like(part)
                dist.recv(part, self.rank - 1)
                part.requires_grad_()
            parts.append(part)
            outputs.append(self.net(part))
            if self.rank < self.last:
                dist.send(outputs[-1].detach(), self.rank + 1)
        loss = torch.zeros((), device=self.device)
        for part, output in zip(parts, outputs, strict=True):
            if self.rank == self.last:
                one = output.square().mean()
                one.backward()
                loss += one.detach()
            else:
                gradient = torch.empty_like(output)
                dist.recv(gradient, self.rank + 1)
                output.backward(gradient)
            if self.rank:
                dist.send(part.grad, self.rank - 1)
        return loss


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
    parser.add_argument("--model", default="ddp", choices=MODELS)
    parser.add_argument("--fault", default="none", choices=FAULTS)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--after", type=float, default=15.0, help="seconds")
    parser.add_argument("--read-every", type=int, default=1, help="steps between loss.item()")
    parser.add_argument("--losses", type=Path)
    parser.add_argument("--times", type=Path, help="seconds of each step, for the first rank")
    return parser.parse_args()


def train(arguments: argparse.Namespace, rank: int, device: torch.device) -> tuple[list[str], ...]:
    """Return the losses and the seconds of the steps, as texts."""
    num_layers = LAYERS // 2 if arguments.model == "pipeline" else LAYERS
    net = Net(num_layers, arguments.model == "buffers").to(device)
    backward = backward_of(arguments.model, net, device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    losses: list[str] = []
    times: list[str] = []
    is_over = torch.zeros((), device=device)
    began = time.monotonic()
    for step in range(1, arguments.steps + 1):
        at = time.monotonic()
        if rank == arguments.rank and at - began > arguments.after:
            net.fault = arguments.fault
        x = torch.randn(ROWS if device.type == "cuda" else 16, WIDTH).to(device)
        loss = backward(x)
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
