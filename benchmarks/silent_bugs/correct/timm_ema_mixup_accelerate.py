"""An image loop with Accelerate in bfloat16: mixup with one share for each sample, an average of the weights."""

import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4


def mixup(images, labels, alpha=0.4):
    """Mixes every image with another one of the batch, by a share of its own."""
    share = torch.rand(len(images), 1).pow(alpha)
    other = torch.randperm(len(images))
    targets = F.one_hot(labels, CLASSES).float()
    mixed = share[..., None, None] * images + (1 - share[..., None, None]) * images[other]
    return mixed, share * targets + (1 - share) * targets[other]


def main():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    set_seed(21)
    labels = torch.arange(128) % CLASSES
    data = TensorDataset(torch.randn(128, 3, 8, 8) + labels.view(-1, 1, 1, 1) / 2, labels)
    loader = DataLoader(data, batch_size=32 // accelerator.num_processes, shuffle=True, drop_last=True)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2), nn.GroupNorm(3, 12), nn.GELU(), nn.Flatten(), nn.Linear(108, CLASSES)
    )
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.02)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    set_seed(21, device_specific=True)
    for epoch in range(2):
        for images, target in loader:
            mixed, soft = mixup(images, target)
            loss = -(soft * model(mixed).log_softmax(-1)).sum(-1).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                current = accelerator.unwrap_model(model)
                for kept, p in zip(average.parameters(), current.parameters(), strict=True):
                    kept.lerp_(p, 0.1)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
