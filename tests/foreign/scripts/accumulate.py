"""A transformer with gradient accumulation, clipping, a schedule and a checkpoint now and then."""

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE, VOCABULARY, BLOCK = 3, 128, 48


class Model(nn.Module):
    """Embeds, mixes and predicts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 96)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK))
        layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, dropout=0.1)
        self.body = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(96, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens), mask=self.mask, is_causal=True))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = DDP(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / math.sqrt(1 + n / 100))
    for step in range(10**9):
        for micro in range(ACCUMULATE):
            tokens = torch.randint(0, VOCABULARY, (8, BLOCK + 1))
            last = micro == ACCUMULATE - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                (loss / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 200 == 199 and rank == 0:
            torch.save(model.module.state_dict(), "checkpoint.pt")
            print(f"step {step + 1}: {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
