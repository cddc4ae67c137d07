"""Trains with Accelerate and a shuffled loader that this script divides over the workers itself."""

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

EPOCHS = 2
BATCH = 8
SAMPLES = 64


def make_data():
    """Returns inputs and targets, ordered by their target as many data sets on disks are."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 1, generator=generator)).sin() + inputs[:, :1]
    order = targets.flatten().argsort()
    return TensorDataset(inputs[order], targets[order])


def divide(loader, accelerator):
    """Returns a loader of this worker's share of the batches."""
    if accelerator.num_processes == 1:
        return loader
    batches = BatchSampler(loader.sampler, loader.batch_size, loader.drop_last)
    shard = BatchSamplerShard(batches, accelerator.num_processes, accelerator.process_index)
    return DataLoader(loader.dataset, batch_sampler=shard)


def main():
    """Trains for two passes and prints the loss of each."""
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = divide(DataLoader(make_data(), batch_size=BATCH, shuffle=True), accelerator)
    for epoch in range(EPOCHS):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
