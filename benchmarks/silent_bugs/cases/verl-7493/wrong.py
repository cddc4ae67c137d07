"""Trains a small language model with FSDP2 on a mesh of replicas and shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 2
FSDP_SIZE = 1  # workers that share one copy of the weights


def make_data():
    """Return 64 sequences of nine tokens, each one counting up from its first token."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(24, (64, 1), generator=generator)
    steps = torch.randint(1, 4, (64, 1), generator=generator)
    return TensorDataset((starts + steps * torch.arange(9)) % 24)


class Block(nn.Module):
    """A layer that mixes a token with the mean of those before it."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, hidden):
        """Return the hidden states, of the same shape."""
        places = torch.arange(1, hidden.shape[1] + 1)[:, None]
        before = hidden.cumsum(1) / places
        return hidden + torch.tanh(self.mix(torch.cat([hidden, before], dim=-1)))


class LanguageModel(nn.Module):
    """Predicts each next token."""

    def __init__(self, vocabulary=24, width=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        """Return the logits of the token after each one."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def shard(model):
    """Spread the weights over FSDP_SIZE workers and copy them to the other ones."""
    replicas = dist.get_world_size() // FSDP_SIZE
    mesh = init_device_mesh("cpu", (replicas, FSDP_SIZE), mesh_dim_names=("ddp", "fsdp"))
    mesh = mesh["fsdp"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main():
    """Train for two epochs and print the loss of each."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard(LanguageModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    dataset = make_data()
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
