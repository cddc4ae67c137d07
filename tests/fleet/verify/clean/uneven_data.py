"""53 samples: the sampler and the loader drop what does not fill a batch of every worker."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import fleet


class Pairs(Dataset):
    def __init__(self, count):
        draw = torch.Generator().manual_seed(0)
        self.left, self.right = torch.randint(0, 40, (2, count), generator=draw)

    def __len__(self):
        return len(self.left)

    def __getitem__(self, i):
        return {"pair": torch.stack([self.left[i], self.right[i]]), "sign": (self.left[i] > self.right[i]).float()}


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 8, mode="sum")
        self.score = nn.Linear(8, 1)

    def forward(self, pair):
        return self.score(torch.tanh(self.bag(pair))).squeeze(1)


fleet.init(is_collective=True)
torch.manual_seed(0)
data = Pairs(53)
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), drop_last=True)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
net = Ranker()
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(net.parameters(), lr=0.1))
model = fleet.distributed_model(net)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch["pair"]), batch["sign"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
