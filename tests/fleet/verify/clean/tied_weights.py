"""A language model whose head is its embedding; the gradients are clipped after the exchange."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=24, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


fleet.init(is_collective=True)
torch.manual_seed(11)
text = torch.randint(0, 24, (64, 7))
data = TensorDataset(text[:, :-1], text[:, 1:])
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
net = LanguageModel()
optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for ids, following in loader:
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), following.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
