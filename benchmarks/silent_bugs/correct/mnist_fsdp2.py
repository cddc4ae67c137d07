"""A small convolutional network on digits, sharded with fully_shard, with Adadelta and a whole state dict."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, BATCH_SIZE, LR, GAMMA = 2, 32, 0.5, 0.7


class Digits(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(10, (count,), generator=generator)
        self.images = torch.randn(count, 1, 14, 14, generator=generator)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        image = self.images[index].clone()
        image[0, self.targets[index]] += 2
        return image, int(self.targets[index])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()
        )
        self.classifier = nn.Sequential(nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return F.log_softmax(self.classifier(self.features(x)), dim=1)


def setup():
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


def train(model, rank, loader, optimizer, epoch, sampler):
    model.train()
    ddp_loss = torch.zeros(2)
    sampler.set_epoch(epoch)
    for data, target in loader:
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        ddp_loss[0] += loss.item() * len(data)
        ddp_loss[1] += len(data)
    dist.all_reduce(ddp_loss, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"Train Epoch: {epoch} \tLoss: {ddp_loss[0] / ddp_loss[1]:.6f}")


def test(model, rank, loader):
    model.eval()
    result = torch.zeros(2)
    with torch.no_grad():
        for data, target in loader:
            result[0] += (model(data).argmax(1) == target).sum()
            result[1] += len(data)
    dist.all_reduce(result)
    if rank == 0:
        print(f"Test set: accuracy {result[0] / result[1]:.2%}")


def main():
    setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = Digits(128, 0), Digits(32, 1)
    train_sampler = DistributedSampler(train_set, rank=rank, num_replicas=world_size, shuffle=True)
    test_sampler = DistributedSampler(test_set, rank=rank, num_replicas=world_size)
    train_loader = DataLoader(train_set, batch_size=BATCH_SIZE // world_size, sampler=train_sampler)
    test_loader = DataLoader(test_set, batch_size=16, sampler=test_sampler)

    model = Net()
    fully_shard(model.features)
    fully_shard(model.classifier)
    fully_shard(model)
    optimizer = optim.Adadelta(model.parameters(), lr=LR)
    scheduler = StepLR(optimizer, step_size=1, gamma=GAMMA)
    for epoch in range(1, EPOCHS + 1):
        train(model, rank, train_loader, optimizer, epoch, train_sampler)
        test(model, rank, test_loader)
        scheduler.step()
    states = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(states, "mnist_cnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
