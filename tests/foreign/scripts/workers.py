"""Words of unequal length, a loader with worker processes, unused parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Words(Dataset):
    """Random words with a class each."""

    def __len__(self):
        return 6400

    def __getitem__(self, index):
        chance = torch.Generator().manual_seed(index)
        length = int(torch.randint(20, 28, (), generator=chance))
        return torch.randint(1, 60, (length,), generator=chance), index % 5


def collate(rows):
    words, labels = zip(*rows, strict=True)
    return pad_sequence(list(words), batch_first=True), torch.tensor(labels)


class Reader(nn.Module):
    """A recurrent network; the second head is for another task."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 48, padding_idx=0)
        self.read = nn.LSTM(48, 96, batch_first=True)
        self.head, self.spare = nn.Linear(96, 5), nn.Linear(96, 3)

    def forward(self, words):
        return self.head(self.read(self.embed(words))[0].mean(1))


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data = Words()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler, num_workers=1, collate_fn=collate)
    model = DDP(Reader(), find_unused_parameters=True)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        for words, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(words), labels).backward()
            optimizer.step()
        epoch += 1


if __name__ == "__main__":
    main()
