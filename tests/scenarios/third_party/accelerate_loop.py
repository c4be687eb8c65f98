"""A training loop with Accelerate.

accelerate launch --cpu --num_processes 2 accelerate_loop.py OUTPUT_DIRECTORY
"""

import sys

import torch
from accelerate import Accelerator
from text import VOCABULARY, corpus
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BLOCK = 32


class Mixer(nn.Module):
    """A model of bytes: an embedding, a transformer layer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    pieces = torch.tensor(list(corpus(900 * BLOCK))).view(-1, BLOCK)
    train = DataLoader(TensorDataset(pieces[:768]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(pieces[768:832]), batch_size=16)
    model = Mixer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, train, test, schedule = accelerator.prepare(
        model, optimizer, train, test, schedule
    )
    for epoch in range(2):
        model.train()
        for (tokens,) in train:
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        for (tokens,) in test:
            with torch.no_grad():
                losses.append(accelerator.gather(loss_of(model, tokens)))
        accelerator.print(f"epoch {epoch}: {torch.stack(losses).mean():.3f}")
        accelerator.save_state(f"{sys.argv[1]}/epoch{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
