"""A small GPT with DistributedDataParallel, in one file.

torchrun --nproc-per-node 2 small_gpt.py OUTPUT_DIRECTORY
"""

import math
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from text import VOCABULARY, corpus
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

block_size, batch_size, width, heads, layers = 32, 8, 64, 4, 2
max_iters, eval_interval, eval_iters, accumulation = 12, 4, 3, 4
warmup_iters, learning_rate = 3, 1e-3


class Block(nn.Module):
    """Attention and a feed-forward part, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tokens in, logits and loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(iteration: int) -> float:
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / warmup_iters
    ratio = (iteration - warmup_iters) / (max_iters - warmup_iters)
    return learning_rate * 0.5 * (1 + math.cos(math.pi * ratio))


ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(backend="gloo")
rank = dist.get_rank() if ddp else 0
master = rank == 0
torch.manual_seed(1337 + rank)
data = torch.tensor(list(corpus()), dtype=torch.uint8)
splits = {"train": data[: int(0.9 * len(data))], "val": data[int(0.9 * len(data)) :]}


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    source = splits[split]
    starts = torch.randint(len(source) - block_size, (batch_size,)).tolist()
    x = torch.stack([source[i : i + block_size].long() for i in starts])
    y = torch.stack([source[i + 1 : i + 1 + block_size].long() for i in starts])
    return x, y


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cuda", enabled=False)
raw_model = model
if ddp:
    model = DistributedDataParallel(model)


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    model.eval()
    out = {}
    for split in splits:
        losses = [raw_model(*get_batch(split))[1].item() for _ in range(eval_iters)]
        out[split] = sum(losses) / len(losses)
    model.train()
    return out


X, Y = get_batch("train")
before = time.time()
for iteration in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = rate(iteration)
    if iteration % eval_interval == 0 and master:
        losses = estimate_loss()
        print(f"step {iteration}: train {losses['train']:.3f}, val {losses['val']:.3f}")
        torch.save(
            {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()},
            os.path.join(sys.argv[1], "ckpt.pt"),
        )
    for micro_step in range(accumulation):
        last = micro_step == accumulation - 1
        with nullcontext() if last or not ddp else model.no_sync():
            _, loss = model(X, Y)
            loss = loss / accumulation
        X, Y = get_batch("train")
        with nullcontext() if last or not ddp else model.no_sync():
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    now = time.time()
    if master:
        print(f"iter {iteration}: loss {loss.item() * accumulation:.4f}, {now - before:.2f} s")
    before = now
if ddp:
    dist.destroy_process_group()
