"""Images with batch normalisation: a sampler, an evaluation after each epoch, torchrun."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AverageMeter:
    """Keeps the average of a value."""

    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def conv(ins, outs):
    return nn.Sequential(nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs), nn.ReLU())


def build():
    return nn.Sequential(
        conv(3, 16), conv(16, 16), nn.MaxPool2d(2), conv(16, 32), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def evaluate(model, images, labels):
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(1) == labels).float().sum()
    dist.all_reduce(right)
    model.train()
    return right.item() / (len(labels) * dist.get_world_size())


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.randn(2048, 3, 24, 24), torch.randint(0, 10, (2048,))
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DDP(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for epoch in range(int(os.environ.get("EPOCHS", "100000"))):
        sampler.set_epoch(epoch)
        losses = AverageMeter()
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), x.size(0))
        accuracy = evaluate(model, images[:128], labels[:128])
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {losses.avg:.4f} accuracy {accuracy:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
