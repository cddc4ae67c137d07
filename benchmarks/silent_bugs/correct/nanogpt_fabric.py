"""A small GPT with Fabric: random windows drawn by every worker, accumulation by no_backward_sync, clipping."""

import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn

BLOCK, VOCAB, WIDTH, BATCH, MICRO_BATCHES, UPDATES = 12, 24, 24, 4, 4, 6


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(BLOCK, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, dropout=0.0, batch_first=True, norm_first=True)
        self.h = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        return self.lm_head(self.h(self.wte(idx) + self.wpe.weight, mask=mask, is_causal=True))


def get_batch(data):
    ix = torch.randint(len(data) - BLOCK - 1, (BATCH,))
    windows = torch.stack([data[i : i + BLOCK + 1] for i in ix.tolist()])
    return windows[:, :-1], windows[:, 1:]


def main():
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", 1)), strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1337)
    data = torch.randint(1, 4, (2000,)).cumsum(0) % VOCAB
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    model, optimizer = fabric.setup(model, optimizer)
    fabric.seed_everything(1337 + fabric.global_rank)
    micro_batches = MICRO_BATCHES // fabric.world_size
    for update in range(UPDATES):
        for i in range(micro_batches):
            x, y = get_batch(data)
            with fabric.no_backward_sync(model, enabled=i < micro_batches - 1):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                fabric.backward(loss / micro_batches)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"update {update}: loss {fabric.all_reduce(loss.detach()).item():.4f}")


if __name__ == "__main__":
    main()
