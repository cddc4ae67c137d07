"""A small convolutional network on digits with Accelerate: gathered metrics after every epoch."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8 * 25, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(x.flatten(1))


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(10, (192,), generator=generator)
    images = torch.randn(192, 1, 14, 14, generator=generator) + labels.view(-1, 1, 1, 1) / 10
    train, test = TensorDataset(images[:128], labels[:128]), TensorDataset(images[128:], labels[128:])
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=16)


def training_function(config):
    accelerator = Accelerator(cpu=True)
    set_seed(config["seed"])
    batch_size = config["batch_size"] // accelerator.num_processes
    train_dataloader, eval_dataloader = get_dataloaders(batch_size)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"] / 25)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    steps = config["num_epochs"] * len(train_dataloader)
    # Stepped once per update by the loop itself, so it is not prepared.
    lr_scheduler = OneCycleLR(optimizer.optimizer, max_lr=config["lr"], total_steps=steps)
    for epoch in range(config["num_epochs"]):
        model.train()
        for inputs, targets in train_dataloader:
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate, num_elems = 0, 0
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                outputs = model(inputs)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), targets))
            num_elems += len(predictions)
            accurate += (predictions == references).sum().item()
        accelerator.print(f"epoch {epoch}: {100 * accurate / num_elems:.2f}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function({"lr": 3e-3, "num_epochs": 2, "seed": 42, "batch_size": 32})
