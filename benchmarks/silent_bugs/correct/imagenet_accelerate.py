"""A residual network with frozen first layers and Accelerate: checkpoints each epoch, the tracker's values gathered."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


class Pets(Dataset):
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        label = index % 5
        generator = torch.Generator().manual_seed(self.first + index)
        return {"image": torch.randn(3, 12, 12, generator=generator) + 0.2 * label, "label": label}


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU())
        self.body = nn.Sequential(Residual(8), Residual(8))
        self.classifier = nn.Linear(8, 5)

    def forward(self, x):
        return self.classifier(self.body(self.stem(x)).mean(dim=(2, 3)))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    batch_size = 32 // accelerator.num_processes
    train_dataloader = DataLoader(Pets(0, 128), shuffle=True, batch_size=batch_size)
    eval_dataloader = DataLoader(Pets(1000, 40), shuffle=False, batch_size=batch_size)
    model = Classifier()
    for p in model.stem.parameters():
        p.requires_grad = False
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=3e-2 / 25)
    lr_scheduler = OneCycleLR(optimizer, max_lr=3e-2, epochs=2, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    for epoch in range(2):
        model.train()
        for batch in train_dataloader:
            outputs = model((batch["image"] - 0.4) / 1.1)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate = total = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model((batch["image"] - 0.4) / 1.1).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: {accurate / total:.1%} of {total}")
        accelerator.save_state(f"epoch_{epoch}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
