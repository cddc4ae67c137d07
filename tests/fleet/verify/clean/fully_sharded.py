"""torch's own fully_shard (FSDP2) with Adam and clipping; no line of Fleet."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 8), torch.randn(96, 3))
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
for layer in (net[0], net[2], net):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data, shuffle=False)):
    nn.functional.mse_loss(net(x), y).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
