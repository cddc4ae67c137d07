"""A classifier of the user's own: accumulated batches, clipped gradients, a schedule, evaluations and checkpoints."""

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Points(Dataset):
    def __init__(self, number):
        self.x = torch.randn(number, 8)
        self.y = torch.randint(0, 3, (number,))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.y[i]}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, labels=None):
        scores = self.net(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean().item()}


def main():
    set_seed(0)
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=1e-2,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        logging_steps=1,
        report_to=[],
        seed=7,
    )
    trainer = Trainer(
        Classifier(), arguments, train_dataset=Points(96), eval_dataset=Points(20), compute_metrics=accuracy
    )
    trainer.train()


if __name__ == "__main__":
    main()
