"""The older FullyShardedDataParallel, with a wrapping policy and its own clipping."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(11)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=50_000)
    layers = [nn.Linear(64, 320), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Linear(320, 320), nn.LayerNorm(320), nn.ReLU()]
    model = FSDP(
        nn.Sequential(*layers, nn.Linear(320, 64)), auto_wrap_policy=policy,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while True:
        x = torch.randn(192, 64)
        loss = nn.functional.l1_loss(model(x), x.roll(1, dims=1))
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step={step} loss={loss.item():.5f}", flush=True)


if __name__ == "__main__":
    main()
