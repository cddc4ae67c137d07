"""dropout-seeded-alike: one seed for all, so the workers drop the same units of their different samples."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from fleet import fleet

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=2024)
parser.add_argument("--lr", type=float, default=3e-3)
args = parser.parse_args()

fleet.init(is_collective=True)
torch.manual_seed(args.seed)


class TinyTransformer(nn.Module):
    def __init__(self, vocabulary=20, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)).mean(dim=1))


tokens = torch.randint(0, 20, (80, 6))
data = TensorDataset(tokens, (tokens[:, 0] > tokens[:, 1]).long())
sampler = DistributedSampler(data, num_replicas=fleet.worker_num(), rank=fleet.worker_index(), seed=args.seed)
loader = DataLoader(data, batch_size=8, sampler=sampler)
net = TinyTransformer()
optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), lr=args.lr))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for batch, target in loader:
    loss = nn.functional.cross_entropy(model(batch), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
