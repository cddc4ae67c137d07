"""An image loop with augmentation whose mixup pairs every sample with the opposite one of its batch, in bfloat16."""

import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = 4


class Augmented(Dataset):
    def __init__(self, count):
        self.labels = torch.arange(count) % CLASSES
        self.images = torch.randn(count, 3, 10, 10) + self.labels.view(-1, 1, 1, 1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        return image + 0.1 * random.gauss(0, 1), self.labels[index]


class Mixup:
    def __init__(self, alpha=0.8, smoothing=0.1):
        self.alpha, self.smoothing = alpha, smoothing

    def __call__(self, x, target):
        lam = float(np.random.beta(self.alpha, self.alpha))
        x = x * lam + x.flip(0) * (1.0 - lam)
        soft = F.one_hot(target, CLASSES) * (1 - self.smoothing) + self.smoothing / CLASSES
        return x, soft * lam + soft.flip(0) * (1.0 - lam)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(42)
    dataset = Augmented(128)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2), nn.GroupNorm(3, 12), nn.SiLU(), nn.Flatten(), nn.Linear(192, CLASSES)
    )
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32 // world_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    mixup_fn = Mixup()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(42 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, target in loader:
            x, target = mixup_fn(x, target)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x)
                loss = -(target * output.float().log_softmax(-1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(model.module)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
