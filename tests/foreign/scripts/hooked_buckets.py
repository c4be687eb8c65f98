"""DDP with a communication hook (gradients travel as float16), in views of the buckets."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, LENGTH, WORDS = 12, 48, 200


class Tagger(nn.Module):
    """Two encoders; a batch needs one of them, so some parameters have no gradient."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 128)
        self.left = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
        self.right = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
        self.head = nn.Linear(128, WORDS)

    def forward(self, words, is_left):
        x = self.embed(words)
        return self.head(self.left(x) if is_left else self.right(x))


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = DDP(
        Tagger(), find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=1
    )
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step, since = 0, time.perf_counter()
    while True:
        words = torch.randint(0, WORDS, (BATCH, LENGTH))
        logits = model(words, is_left=step % 3 != 0)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 50 == 0:
            seconds, since = time.perf_counter() - since, time.perf_counter()
            if dist.get_rank() == 0:
                rate = 50 * BATCH * LENGTH * dist.get_world_size() / seconds
                print(f"[{step}] loss={loss.item():.4f} tokens/s={rate:.1f}", flush=True)


if __name__ == "__main__":
    main()
