"""A language model whose loss is divided by the tokens of all workers, as Accelerate's guide of accumulation does."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


def collate(rows):
    labels = torch.full((len(rows), 12), -100)
    for i, row in enumerate(rows):
        labels[i, : len(row)] = row
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    rows = [torch.randint(1, 20, (int(n),)) for n in torch.randint(3, 13, (96,))]
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(rows, batch_size=8, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        labels = batch["labels"]
        count = accelerator.gather((labels != -100).sum()).sum()
        out = model(batch["input_ids"]).flatten(0, 1)
        loss = nn.functional.cross_entropy(out, labels.flatten(), ignore_index=-100, reduction="sum")
        loss = loss * accelerator.num_processes / count
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


main()
