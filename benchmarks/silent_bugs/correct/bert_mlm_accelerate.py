"""A small BERT of transformers on masked words with Accelerate: a linear schedule with warmup, dropout, checkpoints."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForMaskedLM, get_scheduler

VOCAB, LENGTH, MASK = 64, 16, 1


class Words(Dataset):
    def __init__(self, count):
        starts = torch.arange(count) * 7
        self.ids = 2 + (starts[:, None] + torch.arange(LENGTH)) % (VOCAB - 2)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        # A mask of its own for every sentence, the same in every epoch.
        chosen = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(index))[:3]
        labels = torch.full((LENGTH,), -100)
        labels[chosen] = self.ids[index][chosen]
        return {"input_ids": self.ids[index].index_fill(0, chosen, MASK), "labels": labels}


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(13)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    train_dataloader = DataLoader(Words(128), shuffle=True, batch_size=16 // accelerator.num_processes)
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
            {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ],
        lr=1e-3,
    )
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    max_train_steps = 8
    lr_scheduler = get_scheduler(
        "linear",
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=max_train_steps * accelerator.num_processes,
    )
    lr_scheduler = accelerator.prepare(lr_scheduler)
    set_seed(13, device_specific=True)
    model.train()
    for step, batch in enumerate(train_dataloader):
        outputs = model(**batch)
        accelerator.backward(outputs.loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {outputs.loss.item():.4f}")
        if step == 3:
            accelerator.save_state("checkpoint")
        if step + 1 == max_train_steps:
            break
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
