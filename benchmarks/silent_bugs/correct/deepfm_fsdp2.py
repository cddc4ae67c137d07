"""DeepFM with dense and categorical features, sharded with fully_shard: two optimizers, a multi-step schedule."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CARDINALITIES, DENSE, DIM = (16, 12, 8), 5, 4


class DeepFM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(size, DIM) for size in CARDINALITIES])
        self.first_order = nn.ModuleList([nn.Embedding(size, 1) for size in CARDINALITIES])
        self.dense_linear = nn.Linear(DENSE, 1)
        self.dense_to_embedding = nn.Linear(DENSE, DIM)
        self.deep = nn.Sequential(
            nn.Linear((len(CARDINALITIES) + 1) * DIM, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 1)
        )

    def forward(self, dense, sparse):
        columns = sparse.unbind(dim=1)
        vectors = [table(column) for table, column in zip(self.embeddings, columns, strict=True)]
        stacked = torch.stack([*vectors, self.dense_to_embedding(dense)], dim=1)
        first = sum(table(column) for table, column in zip(self.first_order, columns, strict=True))
        second = 0.5 * (stacked.sum(1).square() - stacked.square().sum(1)).sum(1, keepdim=True)
        return (self.dense_linear(dense) + first + second + self.deep(stacked.flatten(1))).squeeze(1)


def clicks(count):
    sparse = torch.stack([torch.randint(size, (count,)) for size in CARDINALITIES], dim=1)
    dense = torch.randn(count, DENSE)
    labels = ((dense[:, 0] + 0.1 * sparse[:, 0]) > 0.8).float()
    return TensorDataset(dense, sparse, labels)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    data = clicks(192)
    sampler = DistributedSampler(data, shuffle=True, seed=11)
    loader = DataLoader(data, batch_size=48 // world_size, sampler=sampler, drop_last=True)
    model = DeepFM()
    fully_shard(model.deep)
    fully_shard(model)
    tables = [*model.embeddings.parameters(), *model.first_order.parameters()]
    in_tables = {id(p) for p in tables}
    rest = [p for p in model.parameters() if id(p) not in in_tables]
    table_optimizer = torch.optim.Adagrad(tables, lr=0.05)
    optimizer = torch.optim.AdamW(rest, lr=3e-3)
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(o, [3, 6], gamma=0.5) for o in (table_optimizer, optimizer)]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for dense, sparse, labels in loader:
            loss = F.binary_cross_entropy_with_logits(model(dense, sparse), labels)
            for one in (table_optimizer, optimizer):
                one.zero_grad()
            loss.backward()
            for one, scheduler in zip((table_optimizer, optimizer), schedulers, strict=True):
                one.step()
                scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch}: log loss {mean.item() / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
