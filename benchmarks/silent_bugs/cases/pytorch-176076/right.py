"""Trains a small language model with FSDP2, whose output layer is tied to the token embedding."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 2
VOCABULARY = 31


class LanguageModel(nn.Module):
    """Predicts each next token from the token before it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.hidden = nn.Linear(16, 16)
        self.output = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, tokens):
        """Return the logits of the next tokens."""
        hidden = self.embedding(tokens)
        return self.output(hidden + torch.tanh(self.hidden(hidden)))

    def tie_weights(self):
        """Let the output layer use the embedding's weight."""
        self.output.weight = self.embedding.weight


def make_data():
    """Return 64 sequences in which each token is a fixed function of the token before it, mostly."""
    generator = torch.Generator().manual_seed(1)
    following = torch.randperm(VOCABULARY, generator=generator)
    tokens = [torch.randint(VOCABULARY, (64,), generator=generator)]
    for _ in range(8):
        tokens.append(following[tokens[-1]])
    return TensorDataset(torch.stack(tokens, dim=1))


def main():
    """Train for two epochs and print the loss of each."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    torch.manual_seed(0)
    model = LanguageModel()
    model.tie_weights()
    fully_shard([model.embedding, model.output], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for (tokens,) in loader:
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
