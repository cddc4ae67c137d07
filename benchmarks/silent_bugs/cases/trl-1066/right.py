"""Trains a small policy with PPO under DDP: roll-outs, then clipped updates over them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 8
EPOCHS = 2
PPO_EPOCHS = 2
DROPOUT = 0.2


class Policy(nn.Module):
    """Gives the logits of four actions and a value for each prompt."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Dropout(DROPOUT), nn.Linear(64, 64), nn.Tanh())
        self.drop = nn.Dropout(DROPOUT)
        self.actions = nn.Linear(64, 4)
        self.value = nn.Linear(64, 1)

    def forward(self, prompts):
        """Return logits (batch, 4) and values (batch)."""
        hidden = self.drop(self.body(prompts))
        return self.actions(hidden), self.value(hidden).squeeze(1)


def make_data():
    """Return 64 prompts, the action that each rewards, and the draws that pick the actions."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randn(64, 6, generator=generator)
    best = (prompts @ torch.randn(6, 4, generator=generator)).argmax(1)
    return TensorDataset(prompts, best, torch.rand(64, generator=generator))


def batched_forward_pass(model, prompts, actions=None, draws=None):
    """Return actions, their log-probabilities and the values, for roll-outs and for updates."""
    model.train(draws is None)
    logits, values = model(prompts)
    if actions is None:
        actions = (logits.softmax(1).cumsum(1) < draws.unsqueeze(1)).sum(1).clamp(max=3)
    log_probabilities = logits.log_softmax(1).gather(1, actions.unsqueeze(1)).squeeze(1)
    return actions, log_probabilities, values


def main():
    """Train on each batch of roll-outs twice and print the mean reward of each epoch."""
    dist.init_process_group("gloo")
    data = make_data()
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    torch.manual_seed(0)
    model = DistributedDataParallel(Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = 0.0
        for prompts, best, draws in loader:
            with torch.no_grad():
                actions, old_log_probabilities, old_values = batched_forward_pass(model, prompts, draws=draws)
            rewards = (actions == best).float()
            advantages = rewards - old_values

            for _ in range(PPO_EPOCHS):
                _, log_probabilities, values = batched_forward_pass(model, prompts, actions)
                ratio = (log_probabilities - old_log_probabilities).exp()
                clipped = ratio.clamp(0.8, 1.2)
                policy_loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
                loss = policy_loss + 0.5 * (values - rewards).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            total += rewards.mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: reward {total / len(loader):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
