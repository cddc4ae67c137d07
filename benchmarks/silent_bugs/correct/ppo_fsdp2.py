"""Policy optimization with a sharded actor and critic: advantages normalized over all workers, whole-batch epochs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

ENVS, STEPS, ITERATIONS, EPOCHS, CLIP = 16, 8, 2, 4, 0.2


class ActorCritic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy = nn.Linear(width, 3)
        self.value = nn.Linear(width, 1)

    def forward(self, state):
        hidden = self.trunk(state)
        return self.policy(hidden).log_softmax(-1), self.value(hidden).squeeze(-1)


def advance(state, action):
    """A mass on a rail: the action pushes it; it should rest at zero."""
    position, velocity = state.unbind(-1)
    velocity = 0.9 * velocity + 0.2 * (action - 1) + 0.05 * torch.randn(len(action))
    position = position + velocity
    return torch.stack([position, velocity], -1), -(position**2)


def normalized(values):
    """Returns values less their mean over all workers, over their deviation."""
    sums = torch.stack([values.sum(), values.square().sum(), torch.tensor(float(values.numel()))])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    variance = sums[1] / sums[2] - mean**2
    return (values - mean) / (variance.sqrt() + 1e-8)


@torch.no_grad()
def rollout(model, state):
    states, actions, log_probs, rewards = [], [], [], []
    for _ in range(STEPS):
        logits, _ = model(state)
        action = torch.multinomial(logits.exp(), 1).squeeze(-1)
        states.append(state)
        actions.append(action)
        log_probs.append(logits.gather(-1, action[:, None]).squeeze(-1))
        state, reward = advance(state, action)
        rewards.append(reward)
    _, after = model(state)
    returns = []
    for reward in reversed(rewards):
        after = reward + 0.95 * after
        returns.insert(0, after)
    return torch.cat(states), torch.cat(actions), torch.cat(log_probs), torch.cat(returns), state


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = ActorCritic()
    fully_shard(model.trunk)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    state = torch.randn(ENVS // world_size, 2)
    for iteration in range(ITERATIONS):
        states, actions, log_probs, returns, state = rollout(model, state)
        for epoch in range(EPOCHS):
            logits, values = model(states)
            if epoch == 0:
                advantages = normalized(returns - values.detach())
            ratio = (logits.gather(-1, actions[:, None]).squeeze(-1) - log_probs).exp()
            surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            loss = -surrogate.mean() + 0.5 * F.smooth_l1_loss(values, returns)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if rank == 0:
            print(f"iteration {iteration}: return {returns.mean():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
