"""A recurrent language model on a stream: an iterable dataset that every worker reads in its own part."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __init__(self, rank, world_size, count=128, length=12):
        self.rank, self.world_size, self.count, self.length = rank, world_size, count, length
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for number, start in enumerate(torch.randint(30, (self.count,), generator=generator).tolist()):
            if number % self.world_size == self.rank:
                yield (start + torch.arange(self.length + 1) * (1 + start % 3)) % 30


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.rnn = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 30)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    stream = Stream(rank, world_size)
    loader = DataLoader(stream, batch_size=32 // world_size)
    for epoch in range(2):
        stream.epoch = epoch
        for tokens in loader:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, 30), tokens[:, 1:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: perplexity {(total / world_size).exp().item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
