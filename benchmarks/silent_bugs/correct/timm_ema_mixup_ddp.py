"""An image loop with mixup by a permutation, label smoothing, an average of the weights and a cosine schedule."""

import copy
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, EPOCHS, BATCH, SMOOTHING, ALPHA = 4, 2, 32, 0.1, 0.4


class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema_v.copy_(self.decay * ema_v + (1.0 - self.decay) * model_v)


def one_hot(target, off, on):
    return torch.full((len(target), CLASSES), off).scatter_(1, target.view(-1, 1), on)


def mixup(x, target):
    lam = np.random.beta(ALPHA, ALPHA)
    perm = torch.randperm(len(x))
    off = SMOOTHING / CLASSES
    soft = one_hot(target, off, 1.0 - SMOOTHING + off)
    return lam * x + (1 - lam) * x[perm], lam * soft + (1 - lam) * soft[perm]


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(2, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def validate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for x, target in loader:
            counts += torch.tensor([(model(x).argmax(1) == target).sum(), len(x)])
    dist.all_reduce(counts)
    return 100 * counts[0] / counts[1]


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(42)
    labels = torch.arange(160) % CLASSES
    images = torch.randn(160, 3, 12, 12) + labels.view(-1, 1, 1, 1) / 2
    train_set = TensorDataset(images[:128], labels[:128])
    val_set = TensorDataset(images[128:], labels[128:])
    model = build_model()
    model_ema = ModelEma(model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=BATCH // world_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=16, sampler=DistributedSampler(val_set, shuffle=False))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train_loader))
    criterion = SoftTargetCrossEntropy()
    torch.manual_seed(42 + rank)
    np.random.seed(42 + rank)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for x, target in train_loader:
            x, target = mixup(x, target)
            loss = criterion(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            model_ema.update(model.module)
            scheduler.step()
        top1, ema_top1 = validate(model, val_loader), validate(model_ema.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, top-1 {top1:.1f}, of the average {ema_top1:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
