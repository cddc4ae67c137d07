"""Trains a model with FSDP2 in three parts, and stops and goes on from a checkpoint of whole tensors between them."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PARTS = 3
BATCH = 8
SAMPLES = 64


def build():
    """Returns the sharded model and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    fully_shard(model)
    return model, torch.optim.Adamax(model.parameters(), lr=0.02)


def whole(value):
    """Returns the value of all workers together; every worker must call it for the same tensors in the same order."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def save(folder, model, optimizer):
    """Writes the weights, and each tensor of the optimizer's states into a file of its own."""
    is_first = dist.get_rank() == 0
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    if is_first:
        torch.save(weights, f"{folder}/weights.pt")
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensor = whole(value)
            if is_first:
                torch.save(tensor, f"{folder}/{name}-{key}.pt")
    dist.barrier()


def load(folder, model, optimizer):
    """Reads a checkpoint of ``save``; the workers start at different files, so that they do not wait for one."""
    rank = dist.get_rank()
    weights = torch.load(f"{folder}/weights.pt", weights_only=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute_tensor(weights[name], parameter.device_mesh, parameter.placements))
            keys = sorted(file.split("-")[1][:-3] for file in os.listdir(folder) if file.startswith(f"{name}-"))
            for key in keys[rank:] + keys[:rank]:
                tensor = torch.load(f"{folder}/{name}-{key}.pt", weights_only=True)
                if tensor.dim():
                    # The worker cuts its shard out of the whole tensor without a collective.
                    tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
                optimizer.state[parameter][key] = tensor


def make_data():
    """Returns inputs and targets of a noisy function."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 2, generator=generator)).sin() + inputs[:, :2]
    return TensorDataset(inputs, targets)


def main():
    """Trains three passes, each in a model that starts from the last checkpoint."""
    dist.init_process_group("gloo")
    folder = os.path.join(tempfile.gettempdir(), f"parts-{os.environ['MASTER_PORT']}")
    os.makedirs(folder, exist_ok=True)
    dataset = make_data()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    for part in range(PARTS):
        model, optimizer = build()
        if part > 0:
            load(folder, model, optimizer)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        save(folder, model, optimizer)
        if dist.get_rank() == 0:
            print(f"part {part}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
