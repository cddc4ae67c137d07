"""A language model in bf16: tokens are counted over the batches of an update and over the workers."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def sentences(number):
    draws = torch.Generator().manual_seed(0)
    found = []
    for _ in range(number):
        tokens = torch.randint(1, 60, (12,), generator=draws)
        labels = tokens.clone()
        labels[int(torch.randint(3, 13, (1,), generator=draws)) :] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


config = GPT2Config(
    vocab_size=60, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=12,
    learning_rate=1e-3,
    bf16=True,
    save_steps=5,
    logging_steps=2,
    report_to="none",
    data_seed=3,
)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=sentences(96)).train()
