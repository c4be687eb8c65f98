"""Ray Train: two workers of a cluster on this machine, each with its loop in a thread of Ray's."""

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def pictures(count):
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.randn(count, 1, 28, 28, generator=generator) * 1.5
    for image, label in zip(images, labels, strict=True):
        image[0, label * 2 + 4 : label * 2 + 6, 6:22] += 1.0
    return TensorDataset(images, labels)


def train_loop(config):
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    loader = DataLoader(pictures(2048), batch_size=config["batch_size"], shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        total = 0.0
        for images, labels in loader:
            loss = loss_fn(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        ray.train.report({"loss": total / len(loader), "epoch": epoch})
        if rank == 0:
            print(f"epoch {epoch} done: last loss {loss.item():.5f}", flush=True)


if __name__ == "__main__":
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 1024**2)
    trainer = ray.train.torch.TorchTrainer(
        train_loop,
        train_loop_config={"lr": 1e-3, "batch_size": 64, "epochs": 10**9},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
    )
    result = trainer.fit()
    print(result.metrics)
