"""Trains a tiny BERT on handwritten digits, read as sequences of pixels, with Hugging Face's Trainer."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from fleet import fleet
from fleet.integrations.hf import FleetTrainer


def read_digits() -> list[dict[str, Any]]:
    """Returns 1,797 rows: the brightness of 64 pixels, 0 to 16, as token ids, and the digit as label."""
    pairs = zip(*load_digits(return_X_y=True), strict=True)
    return [{"input_ids": torch.tensor(image).long(), "labels": int(label)} for image, label in pairs]


def accuracy(prediction: Any) -> dict[str, float]:
    """Returns the share of rows whose label was predicted."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Trains, evaluates after each epoch, and writes the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", metavar="FILE", help="YAML file of DistributedStrategy options")
    parser.add_argument("--batch-size", type=int, default=16, help="rows a worker trains on at once")
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--output", default="output/transformers", help="folder of the checkpoints and the model")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    options = parser.parse_args()

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=17, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 10
    model = BertForSequenceClassification(config)
    args = TrainingArguments(
        output_dir=options.output, per_device_train_batch_size=options.batch_size, num_train_epochs=options.epochs,
        learning_rate=1e-3, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, logging_steps=10,
        dataloader_drop_last=True, disable_tqdm=True, report_to=[],
    )  # fmt: skip
    rows = read_digits()
    strategy = fleet.DistributedStrategy.load(options.strategy) if options.strategy else None
    trainer = FleetTrainer(
        model=model, args=args, strategy=strategy, compute_metrics=accuracy,
        train_dataset=rows[:1437], eval_dataset=rows[1437:],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()


if __name__ == "__main__":
    main()
