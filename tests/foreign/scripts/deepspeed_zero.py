"""DeepSpeed on processors: its engine holds optimizer, accumulation, clipping and ZeRO."""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH, CLASSES = 256, 16


class Points(Dataset):
    """Points around the centre of their class."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(3)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        centres = torch.randn(CLASSES, WIDTH, generator=generator)
        self.points = 0.1 * centres[self.labels] + torch.randn(count, WIDTH, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.points[index], self.labels[index]


class Net(nn.Module):
    """A few wide layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(),
            nn.Linear(768, CLASSES),
        )  # fmt: skip

    def forward(self, x):
        return self.body(x)


def settings(stage):
    return {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 50,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    net = Net()
    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), training_data=Points(8192),
        config=settings(args.stage),
    )  # fmt: skip
    loss_fn = nn.CrossEntropyLoss()
    while True:
        for points, labels in loader:
            loss = loss_fn(engine(points), labels)
            engine.backward(loss)
            is_update = engine.is_gradient_accumulation_boundary()
            engine.step()
            if is_update and engine.global_steps % 25 == 0 and engine.global_rank == 0:
                print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
