"""Blocks that are sharded with fully_shard."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """A feed-forward part with a residual connection."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = nn.Sequential(*(Block(192) for _ in range(4)), nn.Linear(192, 16))
    for block in list(model)[:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        x, y = torch.randn(128, 192), torch.randint(0, 16, (128,))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


main()
