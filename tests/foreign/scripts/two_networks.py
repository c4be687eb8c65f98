"""A generator and a discriminator: two networks, two optimizers, three backward passes a step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP

NOISE, SIZE = 64, 400


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    make = DDP(nn.Sequential(nn.Linear(NOISE, 512), nn.LeakyReLU(), nn.Linear(512, SIZE)))
    judge = DDP(nn.Sequential(nn.Linear(SIZE, 512), nn.LeakyReLU(), nn.Linear(512, 1)))
    of_make = torch.optim.Adam(make.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
    step = 0
    while True:
        real, noise = torch.randn(96, SIZE), torch.randn(96, NOISE)
        yes, no = torch.ones(96, 1), torch.zeros(96, 1)
        of_judge.zero_grad()
        bce(judge(real), yes).backward()
        false = make(noise)
        bce(judge(false.detach()), no).backward()
        of_judge.step()
        of_make.zero_grad()
        loss = bce(judge(false), yes)
        loss.backward()
        of_make.step()
        step += 1
        if step % 50 == 0:
            print(f"[{step}] rank {dist.get_rank()} G {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
