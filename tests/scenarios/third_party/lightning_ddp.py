"""Language modelling with Lightning, which starts its own second process.

python lightning_ddp.py OUTPUT_DIRECTORY
"""

import sys

import lightning as L
import torch
from text import VOCABULARY, corpus
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BLOCK = 32


class NextByte(L.LightningModule):
    """A small recurrent model of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 48)
        self.recurrent = nn.GRU(48, 96, batch_first=True)
        self.head = nn.Linear(96, VOCABULARY)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        (tokens,) = batch
        hidden, _ = self.recurrent(self.embedding(tokens[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), tokens[:, 1:])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    pieces = torch.tensor(list(corpus(1500 * BLOCK))).view(-1, BLOCK)
    train, validation = TensorDataset(pieces[:1280]), TensorDataset(pieces[1280:1408])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        accumulate_grad_batches=2,
        default_root_dir=sys.argv[1],
        log_every_n_steps=2,
        enable_progress_bar=False,
    )
    trainer.fit(
        NextByte(),
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(validation, batch_size=32),
    )


if __name__ == "__main__":
    main()
