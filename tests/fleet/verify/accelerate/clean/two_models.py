"""A GAN: two models with an optimizer each, and noise that each worker draws."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(11)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    of_maker = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(torch.randn(96, 6)), batch_size=8, shuffle=True)
    maker, judge, of_maker, of_judge, loader = accelerator.prepare(maker, judge, of_maker, of_judge, loader)
    set_seed(11, device_specific=True)
    score = nn.functional.binary_cross_entropy_with_logits
    for _ in range(2):
        for (real,) in loader:
            made = maker(torch.randn(len(real), 4))
            right, wrong = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            loss = score(judge(real), right) + score(judge(made.detach()), wrong)
            of_judge.zero_grad()
            accelerator.backward(loss)
            of_judge.step()
            loss = score(judge(made), right)
            of_maker.zero_grad()
            accelerator.backward(loss)
            of_maker.step()


main()
