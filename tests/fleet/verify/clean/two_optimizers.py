"""A small GAN: two models, two optimizers, noise from a generator that every worker seeds for itself."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fleet import fleet

strategy = fleet.DistributedStrategy()
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(4)
data = TensorDataset(torch.randn(80, 2) @ torch.randn(2, 2))
sampler = DistributedSampler(data, fleet.worker_num(), fleet.worker_index())
loader = DataLoader(data, batch_size=8, sampler=sampler)
generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
generator_optimizer = fleet.distributed_optimizer(torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.99)))
critic_optimizer = fleet.distributed_optimizer(torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.99)))
generator, critic = fleet.distributed_model(generator), fleet.distributed_model(critic)
noise = torch.Generator().manual_seed(50 + fleet.worker_index())
judge = nn.BCEWithLogitsLoss()
sampler.set_epoch(0)
for (real,) in loader:
    fake = generator(torch.randn(len(real), 3, generator=noise))
    scores = critic(torch.cat([real, fake.detach()]))
    loss = judge(scores, torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]))
    critic_optimizer.zero_grad()
    loss.backward()
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    judge(critic(fake), torch.ones(len(real), 1)).backward()
    generator_optimizer.step()
