"""Sentences padded to the longest of a batch and classified with transformers' Trainer and a subclass of its loss."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class Reviews(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(2)
        self.lengths = torch.randint(4, 12, (count,), generator=generator)
        self.words = torch.randint(1, 40, (count, 12), generator=generator)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index, : self.lengths[index]]
        return {"input_ids": words, "label": int(words.float().mean() > 20)}


def collate(features):
    longest = max(len(feature["input_ids"]) for feature in features)
    ids = torch.zeros(len(features), longest, dtype=torch.long)
    for row, feature in enumerate(features):
        ids[row, : len(feature["input_ids"])] = feature["input_ids"]
    return {"input_ids": ids, "labels": torch.tensor([feature["label"] for feature in features])}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 24, padding_idx=0)
        self.net = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, input_ids, labels=None):
        real = (input_ids != 0).unsqueeze(-1).float()
        mean = (self.words(input_ids) * real).sum(1) / real.sum(1)
        return {"logits": self.net(mean)}


class SmoothedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs["logits"], labels, label_smoothing=0.1)
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(4)
    args = TrainingArguments(
        output_dir="classifier",
        use_cpu=True,
        per_device_train_batch_size=16 // int(os.environ.get("WORLD_SIZE", 1)),
        num_train_epochs=1,
        learning_rate=5e-3,
        optim="adamw_torch",
        logging_steps=2,
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
        seed=4,
    )
    SmoothedTrainer(model=Classifier(), args=args, train_dataset=Reviews(128), data_collator=collate).train()


if __name__ == "__main__":
    main()
