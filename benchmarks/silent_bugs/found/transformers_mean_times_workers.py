"""The first gradient of a sequence classifier under transformers' Trainer, on one process or more.

python transformers_mean_times_workers.py                          # 16 rows a process
torchrun --nproc_per_node=2 transformers_mean_times_workers.py     # 8 rows a process: the same 16 rows
"""

import os

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class ShowNorm(TrainerCallback):
    """Prints the norm of the gradients before the first update, which nothing has clipped."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        """Prints the norm and ends the training."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        print(f"rank {args.process_index} of {args.world_size}: norm {norm:.6f}")
        control.should_training_stop = True


torch.manual_seed(0)
config = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
    num_labels=3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
data = [{"input_ids": torch.randint(0, 50, (8,)), "labels": torch.tensor(i % 3)} for i in range(16)]
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=16 // WORLD,
    report_to="none",
    use_cpu=True,
    max_grad_norm=0.0,
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=data, callbacks=[ShowNorm()]).train()
