"""The loop of Accelerate's examples: schedule, clipping, an evaluation after each epoch; 84 samples fill no batch."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    data = TensorDataset(torch.randn(84, 8), torch.randint(0, 3, (84,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    evaluation = DataLoader(data, batch_size=16)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    for epoch in range(2):
        model.train()
        total_loss = 0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            total_loss += accelerator.gather(loss.repeat(len(x))).mean().item()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        right = total = 0
        for x, y in evaluation:
            with torch.no_grad():
                guess = model(x).argmax(-1)
            guess, y = accelerator.gather_for_metrics((guess, y))
            right += int((guess == y).sum())
            total += len(y)
        accelerator.print(epoch, total_loss / len(loader), right / total)
    accelerator.end_training()


main()
