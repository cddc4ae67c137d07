"""A small BERT on masked words, sharded by layers in bfloat16: fixed lengths, the mask drawn in the loop, dropout."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

VOCAB, LENGTH, WIDTH, LAYERS, MASK_ID = 64, 16, 32, 2, 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        attended, _ = self.attention(x, x, x, need_weights=False)
        x = self.norm1(x + self.dropout(attended))
        return self.norm2(x + self.dropout(self.feed(x)))


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.decoder = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.words(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.decoder(x)


def mask_tokens(ids, share=0.25):
    """Masks the words with the smallest random scores: equally many in each sentence."""
    count = int(share * ids.shape[1])
    chosen = torch.rand(ids.shape).argsort(dim=1)[:, :count]
    labels = ids.gather(1, chosen)
    return ids.scatter(1, chosen, MASK_ID), chosen, labels


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(7)
    starts = torch.randint(2, VOCAB, (96, 1))
    dataset = TensorDataset(2 + (starts + torch.arange(LENGTH)) % (VOCAB - 2))
    sampler = DistributedSampler(dataset, seed=7, drop_last=True)
    loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler, drop_last=True)

    model = MaskedLM()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=2 * len(loader))
    torch.manual_seed(7 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            masked, chosen, labels = mask_tokens(ids)
            logits = model(masked)
            picked = logits.gather(1, chosen[..., None].expand(-1, -1, VOCAB))
            loss = F.cross_entropy(picked.float().flatten(0, 1), labels.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
