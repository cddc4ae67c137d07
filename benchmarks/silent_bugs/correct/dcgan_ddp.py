"""A convolutional GAN: two networks with batch norm, two optimizers, real and fake batches in turn."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

nz, ngf, ndf, nc = 8, 8, 8, 1
batch_size, num_epochs, lr, beta1 = 32, 2, 2e-4, 0.5
real_label, fake_label = 1.0, 0.0


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight.data, 1.0, 0.02)
        nn.init.constant_(m.bias.data, 0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 3, 1, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(999)
    dataset = TensorDataset(torch.rand(128, nc, 8, 8) * 2 - 1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size // world_size, sampler=sampler)
    netG = Generator().apply(weights_init)
    netD = Discriminator().apply(weights_init)
    netG, netD = DDP(netG), DDP(netD)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=lr, betas=(beta1, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=lr, betas=(beta1, 0.999))
    torch.manual_seed(999 + rank)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for i, (real,) in enumerate(loader):
            netD.zero_grad()
            label = torch.full((real.size(0),), real_label)
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            noise = torch.randn(real.size(0), nz, 1, 1)
            fake = netG(noise)
            label.fill_(fake_label)
            errD_fake = criterion(netD(fake.detach()), label)
            errD_fake.backward()
            optimizerD.step()

            netG.zero_grad()
            label.fill_(real_label)
            errG = criterion(netD(fake), label)
            errG.backward()
            optimizerG.step()
            if rank == 0:
                errD = errD_real.item() + errD_fake.item()
                print(f"[{epoch}/{num_epochs}][{i}/{len(loader)}] Loss_D: {errD:.4f} Loss_G: {errG.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
