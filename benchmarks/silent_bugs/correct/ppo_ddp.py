"""Proximal policy optimization: every worker steps its own environments and shuffles its own rollout."""

import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributions.categorical import Categorical
from torch.nn.parallel import DistributedDataParallel

total_envs, num_steps, num_iterations, update_epochs, num_minibatches = 8, 16, 2, 2, 2
learning_rate, gamma, gae_lambda, clip_coef, ent_coef, vf_coef, max_grad_norm = 1e-3, 0.99, 0.95, 0.2, 0.01, 0.5, 0.5


class WalkEnvs:
    """Points on a line: a step to the left or to the right, paid by how near the origin is."""

    def __init__(self, num_envs, rng):
        self.num_envs, self.rng = num_envs, rng

    def reset(self):
        self.position = self.rng.uniform(-2, 2, (self.num_envs, 1))
        return self._observation()

    def _observation(self):
        return torch.tensor(np.hstack([self.position, self.position**2]), dtype=torch.float32)

    def step(self, action):
        self.position += np.where(action.numpy()[:, None] == 1, 0.3, -0.3)
        self.position += self.rng.normal(0, 0.05, self.position.shape)
        reward = -np.abs(self.position[:, 0])
        done = np.abs(self.position[:, 0]) > 4
        self.position[done] = 0
        return self._observation(), torch.tensor(reward, dtype=torch.float32), torch.tensor(done, dtype=torch.float32)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))

    def get_value(self, x):
        return self.critic(x)

    def forward(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def main():
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_envs = total_envs // world_size
    batch_size = num_envs * num_steps
    minibatch_size = batch_size // num_minibatches
    torch.manual_seed(1)
    agent = DistributedDataParallel(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5)
    torch.manual_seed(1 + rank)
    np.random.seed(1 + rank)
    envs = WalkEnvs(num_envs, np.random.default_rng(1 + rank))

    next_obs, next_done = envs.reset(), torch.zeros(num_envs)
    obs = torch.zeros(num_steps, num_envs, 2)
    actions, logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(5))
    for iteration in range(num_iterations):
        optimizer.param_groups[0]["lr"] = (1.0 - iteration / num_iterations) * learning_rate
        for step in range(num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.module(next_obs)
            values[step], actions[step], logprobs[step] = value.flatten(), action, logprob
            next_obs, rewards[step], next_done = envs.step(action)

        with torch.no_grad():
            next_value = agent.module.get_value(next_obs).flatten()
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(num_steps)):
                alive = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
                following = next_value if t == num_steps - 1 else values[t + 1]
                delta = rewards[t] + gamma * following * alive - values[t]
                advantages[t] = last = delta + gamma * gae_lambda * alive * last
            returns = advantages + values

        b_obs, b_actions = obs.reshape(-1, 2), actions.reshape(-1)
        b_logprobs, b_advantages, b_returns = logprobs.reshape(-1), advantages.reshape(-1), returns.reshape(-1)
        b_inds = np.arange(batch_size)
        for _ in range(update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, batch_size, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                _, newlogprob, entropy, newvalue = agent(b_obs[mb_inds], b_actions[mb_inds])
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                pg_loss = torch.max(
                    -mb_advantages * ratio, -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
                ).mean()
                v_loss = 0.5 * (newvalue.view(-1) - b_returns[mb_inds]).square().mean()
                loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
                optimizer.step()
        if rank == 0:
            print(f"iteration {iteration}: reward {rewards.mean():.3f}, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
