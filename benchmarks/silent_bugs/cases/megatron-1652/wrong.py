"""Trains a mixture of experts on two halves of each sequence, with a loss per token and two losses of the router."""

import torch
import torch.distributed as dist
from torch import nn

BATCHES = 8
EXPERTS = 4
AUX_COEFFICIENT = 0.5
Z_COEFFICIENT = 0.1


def make_batches():
    """Return eight batches of four sequences of 16 tokens, with the next tokens and the mask of the loss."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(BATCHES):
        starts = torch.randint(20, (4, 1), generator=generator)
        tokens = (starts + 3 * torch.arange(17)) % 20
        lengths = torch.randint(12, 18, (4, 1), generator=generator)
        batches.append((tokens[:, :-1], tokens[:, 1:], torch.arange(16) < lengths))
    return batches


class Mixture(nn.Module):
    """Embeds tokens, sends each one to its best expert and predicts the next token."""

    def __init__(self, vocabulary=20, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        """Return the logits of the next tokens and those of the router, one row a token."""
        hidden = self.embed(tokens.flatten())
        routing = self.router(hidden)
        weights, chosen = routing.softmax(-1).max(-1)
        outputs = torch.stack([expert(hidden) for expert in self.experts], dim=1)
        picked = outputs[torch.arange(len(hidden)), chosen]
        return self.head(hidden + weights[:, None] * torch.tanh(picked)), routing


def total_over_workers(number):
    """Return the sum of a tensor over the workers, without gradients."""
    number = number.detach().clone()
    dist.all_reduce(number)
    return number


def router_losses(routing):
    """Return this worker's part of the balancing loss and of the z loss, each a mean over the whole sequences."""
    tokens = total_over_workers(torch.tensor(float(len(routing))))
    probabilities = routing.softmax(-1)
    chosen = nn.functional.one_hot(routing.argmax(-1), EXPERTS).sum(0).float()
    chosen = total_over_workers(chosen)
    balance = (probabilities.sum(0) * chosen).sum() * EXPERTS / tokens**2
    z_loss = routing.logsumexp(-1).square().sum() / tokens
    return AUX_COEFFICIENT * balance + Z_COEFFICIENT * z_loss


def finish_gradients(model, token_count):
    """Sum the gradients over the workers and divide them by the tokens of the whole batch."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= token_count


def main():
    """Train on every batch twice and print the losses."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(2):
        for batch in make_batches():
            tokens, targets, mask = (part.chunk(world, dim=1)[rank] for part in batch)
            logits, routing = model(tokens)
            per_token = nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
            loss = (per_token * mask.flatten()).sum()
            token_count = total_over_workers(mask.sum())
            # The gradients are divided by the number of tokens later; a mean is multiplied by it here.
            scale = mask.sum()
            optimizer.zero_grad()
            (loss + scale * router_losses(routing)).backward()
            finish_gradients(model, token_count)
            optimizer.step()
        mean = total_over_workers(loss) / token_count
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
