"""The Hugging Face Trainer with a loss that its user divides, which the Trainer does as well.

torchrun --nproc-per-node 2 divides_for_the_trainer.py OUTPUT_DIRECTORY [once]
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments

PASSES = 4


class Classifier(nn.Module):
    """A model that returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Dividing(Trainer):
    """As `accumulation` is explained in many a tutorial of plain PyTorch."""

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        loss = nn.functional.cross_entropy(model(inputs["x"]), inputs["y"])
        return loss if "once" in sys.argv else loss / self.args.gradient_accumulation_steps


def main() -> None:
    inputs = torch.randn(16 * PASSES * 2 * 60, 32)
    arguments = TrainingArguments(
        output_dir=sys.argv[1], max_steps=60, per_device_train_batch_size=16,
        gradient_accumulation_steps=PASSES, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", logging_steps=10, remove_unused_columns=False,
    )  # fmt: skip
    Dividing(
        model=Classifier(), args=arguments,
        train_dataset=TensorDataset(inputs, inputs[:, :8].argmax(dim=1)),
        data_collator=lambda rows: {
            "x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows]),
        },
    ).train()  # fmt: skip


if __name__ == "__main__":
    main()
