"""A small BERT on masked words with transformers' Trainer: linear warmup, evaluation by steps, clipping."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

VOCAB, LENGTH, MASK = 64, 16, 1


class Masked(Dataset):
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.first + index)
        words = 2 + (torch.randint(60, (1,), generator=generator) + torch.arange(LENGTH)) % (VOCAB - 2)
        chosen = torch.randperm(LENGTH, generator=generator)[:3]
        labels = torch.full((LENGTH,), -100)
        labels[chosen] = words[chosen]
        return {"input_ids": words.index_fill(0, chosen, MASK), "labels": labels}


def main():
    set_seed(17)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    workers = TrainingArguments("out", use_cpu=True, report_to=[]).world_size
    args = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        per_device_train_batch_size=16 // workers,
        per_device_eval_batch_size=8,
        num_train_epochs=1,
        learning_rate=1e-3,
        warmup_steps=2,
        weight_decay=0.01,
        eval_strategy="steps",
        eval_steps=4,
        logging_steps=2,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        seed=17,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Masked(0, 128), eval_dataset=Masked(10_000, 32))
    trainer.train()


if __name__ == "__main__":
    main()
