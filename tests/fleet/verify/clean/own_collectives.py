"""A loop with collectives of torch.distributed, samples that are augmented at random, and noise inside the model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from fleet import fleet


class Augmented(Dataset):
    def __init__(self):
        self.x = torch.rand(48, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.05 * torch.randn(6)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        h = self.inside(x)
        return self.outside(h + torch.randn_like(h))


def main():
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    data = Augmented()
    sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    net = Noisy()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=1e-3))
    model = fleet.distributed_model(net)
    torch.manual_seed(1 + fleet.worker_index())  # noise of its own for each worker's samples
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(float(mean) / dist.get_world_size())
        dist.barrier()


if __name__ == "__main__":
    main()
