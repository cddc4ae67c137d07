"""Fine-tunes a small language model under FSDP2 with mixed precision in bfloat16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 4
EPOCHS = 3
VOCABULARY = 24


def make_data():
    """Return 64 sequences of nine tokens, each one counting up from its first token."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(VOCABULARY, (64, 1), generator=generator)
    steps = torch.randint(1, 4, (64, 1), generator=generator)
    return TensorDataset((starts + steps * torch.arange(9)) % VOCABULARY)


class LanguageModel(nn.Module):
    """Predicts each next token from a token and the mean of those before it."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.mix = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        """Return the logits of the token after each one."""
        hidden = self.embed(tokens)
        places = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[:, None]
        before = hidden.cumsum(1) / places
        return self.head(torch.tanh(self.mix(torch.cat([hidden, before], dim=-1))))


def load_model(dtype):
    """Return the pretrained model with its weights in a dtype."""
    torch.manual_seed(0)
    return LanguageModel().to(dtype)


def main():
    """Train for three epochs and print the loss of each."""
    dist.init_process_group("gloo")
    model = load_model(torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
