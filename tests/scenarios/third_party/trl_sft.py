"""Supervised fine-tuning with TRL, of a tiny model with random weights and a made-up vocabulary.

torchrun --nproc-per-node 2 trl_sft.py OUTPUT_DIRECTORY
"""

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ("the", "owl", "sees", "a", "mouse", "at", "night", "and", "waits")
STEPS = 12


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(("<pad>", "<eos>", "<unk>", *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def main() -> None:
    texts = [
        " ".join(WORDS[(start + place) % len(WORDS)] for place in range(12)) for start in range(400)
    ]
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        bos_token_id=1,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"text": texts}),
        args=SFTConfig(
            output_dir=sys.argv[1], max_steps=STEPS, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, logging_steps=3, save_strategy="no", use_cpu=True,
            bf16=False, report_to=[], disable_tqdm=True, max_length=32,
            ddp_find_unused_parameters=False,
        ),
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    main()
