"""Trains a small classifier with FSDP2 through a strategy that takes a precision plugin."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 8
EPOCHS = 4


class HalfPrecision:
    """A plugin: the model computes in bfloat16, gradients are reduced in float32."""

    def policy(self):
        """Return the plugin's policy."""
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


class ShardedStrategy:
    """Shards a model over all ranks; takes a precision plugin as every strategy does."""

    def __init__(self, precision=None):
        self.precision = precision
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def setup(self, model):
        """Shard each linear layer and then the model."""
        policy = MixedPrecisionPolicy()
        for module in model:
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=self.mesh, mp_policy=policy)
        return fully_shard(model, mesh=self.mesh, mp_policy=policy)


def make_data():
    """Return 96 points of four classes, which a fixed generator draws."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(4, 10, generator=generator)
    labels = torch.randint(4, (96,), generator=generator)
    points = centres[labels] + torch.randn(96, 10, generator=generator)
    return TensorDataset(points, labels)


def main():
    """Train in bfloat16 for four epochs and print the loss of each."""
    dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    torch.manual_seed(0)
    strategy = ShardedStrategy(precision=HalfPrecision())
    model = strategy.setup(nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
