"""DeepFM on clicks: embeddings of fields, a factorization machine and a deep part; a test on worker 0 alone."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FIELD_DIMS = [10, 20, 30, 6]


class Clicks(Dataset):
    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.fields = np.stack([rng.integers(0, dim, count) for dim in FIELD_DIMS], axis=1)
        self.targets = ((self.fields.sum(axis=1) % 3) == 0).astype(np.float32)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.fields[index], self.targets[index]


class FeaturesEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embedding = nn.Embedding(sum(FIELD_DIMS), dim)
        self.register_buffer("offsets", torch.tensor([0, *np.cumsum(FIELD_DIMS)[:-1]]), persistent=False)
        nn.init.xavier_uniform_(self.embedding.weight)

    def forward(self, x):
        return self.embedding(x + self.offsets)


class DeepFM(nn.Module):
    def __init__(self, dim=8, hidden=(32, 16), dropout=0.2):
        super().__init__()
        self.linear = FeaturesEmbedding(1)
        self.embedding = FeaturesEmbedding(dim)
        self.bias = nn.Parameter(torch.zeros(1))
        layers, width = [], len(FIELD_DIMS) * dim
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU(), nn.Dropout(dropout)]
            width = size
        self.mlp = nn.Sequential(*layers, nn.Linear(width, 1))

    def forward(self, x):
        embedded = self.embedding(x)
        square_of_sum = embedded.sum(dim=1) ** 2
        sum_of_square = (embedded**2).sum(dim=1)
        fm = 0.5 * (square_of_sum - sum_of_square).sum(dim=1, keepdim=True)
        out = self.linear(x).sum(dim=1) + self.bias + fm + self.mlp(embedded.flatten(1))
        return torch.sigmoid(out.squeeze(1))


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(2024)
    train_set, valid_set = Clicks(256, 0), Clicks(64, 1)
    sampler = DistributedSampler(train_set, seed=5)
    loader = DataLoader(train_set, batch_size=64 // world_size, sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=64)
    model = DDP(DeepFM())
    criterion = nn.BCELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-6)
    torch.manual_seed(2024 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for fields, target in loader:
            loss = criterion(model(fields), target.float())
            model.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                hits = sum(((model.module(x) > 0.5) == (y > 0.5)).sum().item() for x, y in valid_loader)
            print(f"epoch: {epoch} loss: {loss.item():.4f} accuracy: {hits / len(valid_set):.3f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
