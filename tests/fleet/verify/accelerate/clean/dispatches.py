"""A stream of samples that worker 0 reads and sends out, and a loader whose batches are split."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(60):
            yield {"x": torch.randn(6, generator=generator), "y": torch.randn(1, generator=generator)}


def main():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    set_seed(1)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    other = TensorDataset(torch.randn(48, 6), torch.randn(48, 1))
    stream, pairs = DataLoader(Stream(), batch_size=8), DataLoader(other, batch_size=8, shuffle=True)
    model, optimizer, stream, pairs = accelerator.prepare(model, optimizer, stream, pairs)
    for _ in range(2):
        for batch, (x, y) in zip(stream, pairs, strict=False):
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"]) + nn.functional.l1_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()


main()
