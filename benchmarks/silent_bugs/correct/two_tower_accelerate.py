"""Two towers with Accelerate: a loader for each of two markets, taken in turn, and a loss by margin."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Retrieval(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.query = nn.Sequential(nn.EmbeddingBag(50, dim, mode="mean"), nn.Linear(dim, dim))
        self.item = nn.Sequential(nn.Embedding(30, dim), nn.Linear(dim, dim), nn.Tanh())

    def forward(self, words, wanted, other):
        query = F.normalize(self.query(words), dim=-1)
        return (query * self.item(wanted)).sum(-1), (query * self.item(other)).sum(-1)


def market(seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(50, (96, 5), generator=generator)
    return TensorDataset(words, words.sum(1) % 30, torch.randint(30, (96,), generator=generator))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(6)
    size = 24 // accelerator.num_processes
    loaders = [DataLoader(market(seed), batch_size=size, shuffle=True, drop_last=True) for seed in (1, 2)]
    model = Retrieval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    for epoch in range(2):
        for batches in zip(*loaders, strict=True):
            for words, wanted, other in batches:
                right, wrong = model(words, wanted, other)
                loss = F.margin_ranking_loss(right, wrong, torch.ones_like(right), margin=0.3)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
