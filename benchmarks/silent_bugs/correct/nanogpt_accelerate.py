"""A small causal language model with Accelerate: accumulation by its context, clipping when gradients are exchanged."""

import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

VOCAB, BLOCK, WIDTH = 32, 16, 32


class Tokens(Dataset):
    def __init__(self, count):
        steps = torch.randint(1, 4, (count * BLOCK + 1,), generator=torch.Generator().manual_seed(0))
        self.tokens = steps.cumsum(0) % VOCAB

    def __len__(self):
        return len(self.tokens) // BLOCK

    def __getitem__(self, index):
        window = self.tokens[index * BLOCK : (index + 1) * BLOCK + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(BLOCK)
        logits = self.head(self.layers(x, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    dataset = Tokens(128)
    loader = DataLoader(dataset, shuffle=True, batch_size=8 // accelerator.num_processes)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = math.ceil(len(loader) / accelerator.gradient_accumulation_steps)
    # A prepared schedule moves once for every worker at each update.
    scheduler = LambdaLR(optimizer, lambda step: 1 - 0.5 * step / (updates * accelerator.num_processes))
    scheduler = accelerator.prepare(scheduler)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss, _ = model(**batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
