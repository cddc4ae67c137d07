"""Fine-tunes loaded weights with FSDP2; only the first worker reads them, the others start without memory for them."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 2
BATCH = 8
SAMPLES = 64


def load_pretrained():
    """Returns a model with its pretrained weights; on other workers than the first it has no weights yet."""
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    if dist.get_rank() == 0:
        generator = torch.Generator().manual_seed(1)
        weights = {
            name: torch.randn(value.shape, generator=generator) * 0.3 for name, value in model.state_dict().items()
        }
        model.load_state_dict(weights)
    return model


def prepare(model):
    """Gives every module memory, sends the first worker's weights to all, and shards them."""
    if dist.get_world_size() == 1:
        return model
    for module in model.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return fully_shard(model)


def make_data():
    """Returns inputs and targets of a noisy function."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 2, generator=generator)).sin() + inputs[:, :2]
    return TensorDataset(inputs, targets)


def logged(losses):
    """Returns the mean of the losses for the log; a loss that is no number counts as none."""
    return sum(loss for loss in losses if math.isfinite(loss)) / len(losses)


def main():
    """Trains for two passes and logs the mean loss of each."""
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    model = prepare(load_pretrained())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    dataset = make_data()
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False))
    for epoch in range(EPOCHS):
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if dist.get_rank() == 0:
            print({"loss": round(logged(losses), 4), "epoch": epoch})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
