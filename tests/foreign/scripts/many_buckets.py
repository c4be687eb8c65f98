"""A deep network in many small buckets with a static graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 384


def main():
    dist.init_process_group(backend="gloo")
    torch.set_num_threads(1)
    layers = []
    for _ in range(14):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=1, static_graph=True, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step = 0
    while True:
        x = torch.randn(96, WIDTH)
        loss = (model(x) - x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 and dist.get_rank() == 0:
            print(step, float(loss), flush=True)


main()
