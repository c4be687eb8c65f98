"""Language modelling with the Hugging Face Trainer, as its users write it.

torchrun --nproc-per-node 2 huggingface_trainer.py OUTPUT_DIRECTORY
"""

import sys

import torch
from text import VOCABULARY, corpus
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

BLOCK = 64


class Blocks(Dataset):
    """Consecutive pieces of the text."""

    def __init__(self, text: bytes) -> None:
        self.tokens = torch.tensor(list(text), dtype=torch.long)

    def __len__(self) -> int:
        return len(self.tokens) // BLOCK

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * BLOCK : (index + 1) * BLOCK]
        return {"input_ids": piece, "labels": piece}


def main() -> None:
    text = corpus(120_000)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=BLOCK, n_embd=64, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=12,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=6,
        save_steps=6,
        logging_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=1,
        ddp_find_unused_parameters=False,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Blocks(text[:100_000]),
        eval_dataset=Blocks(text[100_000:]),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
