"""A text classifier with dropout: the Trainer seeds all workers alike, which is not the script's doing."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
    num_labels=3,
    attn_implementation="eager",
)
torch.manual_seed(0)
data = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 3)} for i in range(96)]
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=8,
    num_train_epochs=3,
    report_to="none",
    max_grad_norm=0.5,
    average_tokens_across_devices=False,  # this model takes the mean by itself, which the Trainer would multiply
)
Trainer(BertForSequenceClassification(config), arguments, train_dataset=data).train()
