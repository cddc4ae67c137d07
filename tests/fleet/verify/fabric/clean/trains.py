"""The loop of Fabric's guide: clipped gradients, a validation over all workers, a schedule, logs and a checkpoint."""

import lightning as L
import torch
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp", loggers=CSVLogger("logs"))
    fabric.launch()
    fabric.seed_everything(0)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    held_out = DataLoader(data, batch_size=16)
    loader, held_out = fabric.setup_dataloaders(DataLoader(data, batch_size=8, shuffle=True), held_out)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(3):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            fabric.log("loss", loss.item())
        schedule.step()
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.cross_entropy(model(x), y) for x, y in held_out]
        fabric.print(epoch, fabric.all_reduce(torch.stack(losses).mean()))
        model.train()
        fabric.save("last.ckpt", {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()
