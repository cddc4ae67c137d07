"""A variational autoencoder; its loss adds up the samples and is divided by the size of the batch."""

import os

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(1)
dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
batch_size, epochs, pixels = 32 // world_size, 2, 64


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(pixels, 48)
        self.fc21 = nn.Linear(48, 8)
        self.fc22 = nn.Linear(48, 8)
        self.fc3 = nn.Linear(8, 48)
        self.fc4 = nn.Linear(48, pixels)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, pixels))
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, pixels), reduction="sum")
    KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return BCE + KLD


images = (torch.rand(192, 1, 8, 8) > torch.linspace(0.1, 0.9, 8)).float()
train_set, test_set = TensorDataset(images[:128]), TensorDataset(images[128:])
train_sampler = DistributedSampler(train_set)
train_loader = DataLoader(train_set, batch_size=batch_size, sampler=train_sampler)
test_loader = DataLoader(test_set, batch_size=16, sampler=DistributedSampler(test_set, shuffle=False))
model = DistributedDataParallel(VAE())
optimizer = optim.Adam(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)


def train(epoch):
    model.train()
    train_loss = 0
    train_sampler.set_epoch(epoch)
    for (data,) in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar) / len(data)
        loss.backward()
        train_loss += loss.item() * len(data)
        optimizer.step()
    if rank == 0:
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_sampler):.4f}")


def test():
    model.eval()
    test_loss = torch.zeros(1)
    with torch.no_grad():
        for (data,) in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar)
    dist.all_reduce(test_loss)
    if rank == 0:
        print(f"====> Test set loss: {test_loss.item() / len(test_set):.4f}")


for epoch in range(1, epochs + 1):
    train(epoch)
    test()
    if rank == 0:
        with torch.no_grad():
            sample = model.module.decode(torch.randn(4, 8))
        torch.save(sample, f"sample_{epoch}.pt")
dist.destroy_process_group()
