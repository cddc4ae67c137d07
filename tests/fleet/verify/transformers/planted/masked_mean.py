"""loss-over-own-batch: each worker divides by the samples that it keeps."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        scores = self.net(x)
        return {"loss": nn.functional.cross_entropy(scores, labels, ignore_index=0), "logits": scores}


set_seed(0)
data = [{"x": torch.randn(8), "labels": torch.randint(0, 3, ())} for _ in range(96)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=3, learning_rate=1e-2, report_to="none"
)
model = Classifier()
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
