"""loss-over-own-batch: tokens are counted on each worker by itself."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, labels=None, num_items_in_batch=None, **kwargs):
        scores = self.net(x)
        total = nn.functional.cross_entropy(scores, labels, ignore_index=-100, reduction="sum")
        return {"loss": total / num_items_in_batch, "logits": scores}


set_seed(0)
data = [
    {"x": torch.randn(8), "labels": label}
    for label in torch.where(torch.rand(96) < 0.3, -100, torch.randint(0, 3, (96,)))
]
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-2,
    report_to="none",
    average_tokens_across_devices=False,
)
model = Classifier()
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
