"""A small GPT-2 with transformers' Trainer: accumulation, a cosine schedule, labels that the model shifts."""

import os

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator, set_seed


class Blocks(Dataset):
    def __init__(self, count, block=16, vocab=48):
        steps = torch.randint(1, 4, (count * block,), generator=torch.Generator().manual_seed(5))
        self.blocks = (steps.cumsum(0) % vocab).view(count, block)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, index):
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def main():
    set_seed(0)
    config = GPT2Config(
        vocab_size=48, n_positions=16, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    args = TrainingArguments(
        output_dir="gpt2",
        use_cpu=True,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", 1)),
        gradient_accumulation_steps=2,
        max_steps=8,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=4,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=args, train_dataset=Blocks(128), data_collator=default_data_collator
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
