"""A pipeline that is cut from a plain model, with a tied weight, a residual connection and a buffer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fleet


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(4)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h + first))


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


strategy = fleet.DistributedStrategy()
strategy.pipeline = True
strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 4, "split": "auto"}
strategy.hybrid_configs = {"pp_degree": 2}
fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 12, (64, 6)), torch.randint(0, 12, (64, 6)))
model = fleet.distributed_model(Net(), loss_of)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1, 0.9))
sampler = DistributedSampler(data, fleet.data_replicas(), fleet.data_rank())
for batch in DataLoader(data, batch_size=8, sampler=sampler):
    model.train_batch(batch, optimizer)
