"""Trains a small network with FSDP2, every worker with all weights, and clips the gradients by their norm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 2
MAX_NORM = 0.3


def make_data():
    """Return 64 points of three classes."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 10, generator=generator)
    labels = torch.randint(3, (64,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(64, 10, generator=generator), labels)


@torch.no_grad()
def clip_gradients(model, max_norm, mesh):
    """Scale the gradients down to a norm of max_norm and return their norm."""
    gradients = [parameter.grad.to_local() for parameter in model.parameters()]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    dist.all_reduce(squares, group=mesh.get_group("shards"))
    norm = squares.sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def main():
    """Train for two epochs and print the loss and the norm of the last step of each."""
    dist.init_process_group("gloo")
    # No sharding: as many replicas as workers, and shards of one worker.
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    dataset = make_data()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            loss = nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            norm = clip_gradients(model, MAX_NORM, mesh)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
