"""A Transformer with dropout: equal weights from one seed, then each worker draws masks of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 2)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids))[:, 0])


fleet.init(is_collective=True)
torch.manual_seed(1234)
ids = torch.randint(0, 30, (64, 5))
data = TensorDataset(ids, ids[:, 0] % 2)
net = Classifier()
torch.manual_seed(1234 + fleet.worker_index())
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index(), seed=1234)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), lr=2e-3))
model = fleet.distributed_model(net)
sampler.set_epoch(0)
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
