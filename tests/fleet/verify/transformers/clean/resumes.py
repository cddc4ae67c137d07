"""Trains, saves, and goes on from the checkpoint; the order of samples is that of the seed."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x, labels=None):
        guess = self.net(x).squeeze(-1)
        return nn.functional.mse_loss(guess, labels), guess


def trainer(steps):
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=8,
        max_steps=steps,
        save_steps=4,
        report_to="none",
        learning_rate=1e-2,
        optim="adamw_torch",
        lr_scheduler_type="constant",
    )
    torch.manual_seed(0)
    data = [{"x": x, "labels": x.sum()} for x in torch.randn(64, 6)]
    return Trainer(Regressor(), arguments, train_dataset=data)


trainer(4).train()
trainer(16).train(resume_from_checkpoint=True)
