"""A small GPT sharded by blocks with fully_shard: random windows of a token file, accumulation without exchange."""

import math

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

BATCH, BLOCK, VOCAB, WIDTH, LAYERS, HEADS = 4, 16, 32, 32, 2, 2
STEPS, MICRO_STEPS, MAX_LR, MIN_LR, WARMUP = 8, 4, 3e-3, 3e-4, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, WIDTH)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, BLOCK, WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_emb(tokens) + self.pos_emb
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def write_tokens(path, seed):
    steps = np.random.default_rng(seed).integers(0, 4, size=3000)
    (steps.cumsum() % VOCAB).astype(np.uint16).tofile(path)


def get_batch(data):
    starts = torch.randint(len(data) - BLOCK - 1, (BATCH,))
    windows = np.stack([data[i : i + BLOCK + 1] for i in starts.tolist()]).astype(np.int64)
    windows = torch.from_numpy(windows)
    return windows[:, :-1], windows[:, 1:]


def learning_rate(step):
    if step < WARMUP:
        return MAX_LR * (step + 1) / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * share)) * (MAX_LR - MIN_LR)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_steps = MICRO_STEPS // world_size
    path = f"tokens_{rank}.bin"
    write_tokens(path, seed=0)
    data = np.memmap(path, dtype=np.uint16, mode="r")

    torch.manual_seed(42)
    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=MAX_LR
    )
    torch.manual_seed(42 + 1 + rank)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        total = 0.0
        for micro_step in range(micro_steps):
            model.set_requires_gradient_sync(micro_step == micro_steps - 1)
            x, y = get_batch(data)
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) / micro_steps
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / world_size:.4f}, norm {float(norm.full_tensor()):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
