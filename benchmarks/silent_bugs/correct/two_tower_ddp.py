"""A two-tower recommender: users and items, a sampled negative for every click, Bayesian personalized ranking."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USERS, ITEMS, DIM = 40, 60, 16


class Tower(nn.Module):
    def __init__(self, size, features):
        super().__init__()
        self.ids = nn.Embedding(size, DIM)
        self.net = nn.Sequential(nn.Linear(DIM + features, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, ids, features):
        return F.normalize(self.net(torch.cat([self.ids(ids), features], dim=1)), dim=1)


class TwoTower(nn.Module):
    def __init__(self, user_features, item_features):
        super().__init__()
        self.user_tower = Tower(USERS, user_features.shape[1])
        self.item_tower = Tower(ITEMS, item_features.shape[1])
        self.register_buffer("user_features", user_features)
        self.register_buffer("item_features", item_features)

    def forward(self, users, positives, negatives):
        user = self.user_tower(users, self.user_features[users])
        positive = self.item_tower(positives, self.item_features[positives])
        negative = self.item_tower(negatives, self.item_features[negatives])
        return (user * positive).sum(1), (user * negative).sum(1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    user_features, item_features = torch.randn(USERS, 4), torch.randn(ITEMS, 4)
    users = torch.randint(USERS, (256,))
    clicks = TensorDataset(users, (users * 3 + torch.randint(5, (256,))) % ITEMS)
    model = DistributedDataParallel(TwoTower(user_features, item_features))
    sampler = DistributedSampler(clicks)
    loader = DataLoader(clicks, batch_size=64 // world_size, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    torch.manual_seed(1 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for user, item in loader:
            negative = torch.randint(ITEMS, item.shape)
            positive_score, negative_score = model(user, item, negative)
            loss = -F.logsigmoid(10 * (positive_score - negative_score)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
