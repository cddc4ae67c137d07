"""torch's own tensor parallelism (parallelize_module): both workers train one model on the same batches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
net = parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for x, y in DataLoader(data, batch_size=8):
    nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
