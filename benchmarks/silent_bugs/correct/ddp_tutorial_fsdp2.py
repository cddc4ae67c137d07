"""The tutorial of fully_shard: a small transformer on random tokens, saved in parts and as a whole."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.fsdp import fully_shard


class ToyTransformer(nn.Module):
    def __init__(self, vocab=32, dim=32, layers=2, length=8):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.pos_embeddings = nn.Embedding(length, dim)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True) for _ in range(layers)]
        )
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


class Checkpointer:
    def __init__(self, folder):
        self.folder = folder

    def save(self, model, optimizer):
        states, optimizer_states = get_state_dict(model, optimizer)
        dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=os.path.join(self.folder, "parts"))
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(whole, os.path.join(self.folder, "model_state_dict.pt"))


def main(epochs=8, batch_size=16):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = ToyTransformer()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(rank + 1)
    for epoch in range(epochs):
        x = torch.randint(0, 32, (batch_size // world_size, 8))
        loss = nn.functional.cross_entropy(model(x).transpose(1, 2), (x + 1) % 32)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    os.makedirs("checkpoints", exist_ok=True)
    Checkpointer("checkpoints").save(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
