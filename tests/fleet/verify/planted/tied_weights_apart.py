"""tied-weights-apart: sending worker 0's weights to the others makes new parameters, also of the shared matrix."""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


class BigramModel(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embed(ids))))


def send_weights(net):
    """Starts every worker from worker 0's weights."""
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = parameter.detach().clone()
            dist.broadcast(value, src=0)
            setattr(module, name, nn.Parameter(value))


fleet.init(is_collective=True)
torch.manual_seed(11)
text = torch.randint(0, 24, (97,))
data = TensorDataset(text[:-1], text[1:])
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
net = BigramModel(24, 16)
if fleet.worker_num() > 1:
    send_weights(net)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.5))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for now, following in loader:
    loss = nn.functional.cross_entropy(model(now), following)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
