"""Gates: which experts each token goes to, with which weight, and the loss that spreads the tokens evenly.

[Note: As one process]
Capacities and losses count the tokens of all workers, those that train on other rows too, so that they equal the
numbers of a single process with all the data, and do not change with the number of workers. An expert over its
capacity keeps the tokens of the first workers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fleet.errors import ConfigError
from fleet.moe.expert_mesh import ExpertMesh


class BaseGate(nn.Module):
    """The interface of a gate to its layer of experts.

    ``forward`` of a subclass takes tokens ``[n, d_model]`` and returns the weights and the indices of their experts,
    each ``[n, top_k]``; index -1 is none.

    Args:
        num_expert: experts of each worker.
        world_size: workers that share the experts.
    """

    def __init__(self, num_expert: int, world_size: int) -> None:
        super().__init__()
        self.num_expert = num_expert
        self.world_size = world_size
        self.tot_expert = num_expert * world_size
        self.mesh: ExpertMesh | None = None  # the layer sets it
        self._loss: Tensor | None = None

    def set_loss(self, loss: Tensor) -> None:
        """Keeps the loss of a forward for :meth:`get_loss`."""
        self._loss = loss

    def get_loss(self, clear: bool = True) -> Tensor | None:
        """Returns the loss of the last forward, to be added to the model's, or ``None``.

        Args:
            clear: forget it, so that it is used once.
        """
        loss = self._loss
        if clear:
            self._loss = None
        return loss

    @property
    def has_loss(self) -> bool:
        """Whether :meth:`get_loss` returns a loss."""
        return self._loss is not None

    def counted(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the number of tokens that chose each expert: on the workers before this one, on this one, on all.

        The last entry of each is the number of tokens.
        """
        own = torch.bincount(chosen.flatten()[chosen.flatten() >= 0], minlength=self.tot_expert)
        # The number of tokens travels with the counts, in one message.
        own = torch.cat([own, own.new_tensor([chosen.shape[0]])])
        rows, place = (own.unsqueeze(0), 0) if self.mesh is None else self.mesh.counts(own)
        return rows[:place].sum(0), own, rows.sum(0)

    def summed(self, x: Tensor) -> Tensor:
        """Returns the sum of ``x`` over all workers' tokens; see [Note: As one process]."""
        return x if self.mesh is None else self.mesh.summed(x)


class NaiveGate(BaseGate):
    """Sends each token to the ``topk`` experts with the highest scores, weighted by the scores themselves.

    Args:
        d_model: the size of a token.
        num_expert: experts of each worker.
        world_size: workers that share the experts.
        topk: experts for each token.

    Raises:
        ConfigError: there are fewer experts than ``topk``.
    """

    def __init__(self, d_model: int, num_expert: int, world_size: int, topk: int = 2) -> None:
        super().__init__(num_expert, world_size)
        if not 1 <= topk <= self.tot_expert:
            raise ConfigError(
                f"{type(self).__name__}(topk={topk!r}): there are {self.tot_expert} experts to choose from."
            )
        self.gate = nn.Linear(d_model, self.tot_expert)
        self.top_k = topk

    def forward(self, inp: Tensor, return_all_scores: bool = False) -> Any:
        """Returns weights and indices, and with ``return_all_scores`` the scores of all experts."""
        scores = self.gate(inp)
        value, chosen = torch.topk(scores, self.top_k, dim=-1)
        return (value, chosen, scores) if return_all_scores else (value, chosen)


class GShardGate(NaiveGate):
    """Sends each token to two experts, the second at random in proportion to its score; experts have a capacity.

    Args:
        d_model: the size of a token.
        num_expert: experts of each worker.
        world_size: workers that share the experts.
        topk: 2 only.
        capacity: an expert takes at most this many times the number of tokens, in training and in evaluation.
        random_routing: drop the second expert of a token more often the lower its score is, in training as in
            evaluation; each worker draws from its own random stream.
        group: not used; the layer knows its workers.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 2,
        capacity: tuple[float, float] = (1.2, 2.4),
        random_routing: bool = True,
        group: Any = None,
    ) -> None:
        if topk != 2:
            raise ConfigError(
                f"GShardGate(topk={topk!r}): gshard sends each token to 2 experts. Set 2, or use NaiveGate."
            )
        super().__init__(d_model, num_expert, world_size, topk)
        self.capacity = capacity
        self.random_routing = random_routing

    def forward(self, x: Tensor, return_all_scores: bool = False) -> Any:
        """Returns weights and indices, and keeps the loss ``mean(fraction * probability) * experts ** 2``."""
        value, chosen, scores = super().forward(x, return_all_scores=True)
        before, _, total = self.counted(chosen)
        tokens = number_of(total[-1])
        probability = self.summed(scores.softmax(-1).sum(0)) / max(tokens, 1)
        fraction = total[:-1].to(probability.dtype) / max(tokens, 1)
        self.set_loss((fraction * probability).mean() * self.tot_expert**2)
        chosen = limited(chosen, before, math.ceil(self.capacity[0 if self.training else 1] * tokens))
        if self.random_routing:
            drawn = torch.rand(chosen.shape[0], device=chosen.device)
            second = chosen[:, 1].masked_fill(2 * value[:, 1] < drawn, -1)
            chosen = torch.stack([chosen[:, 0], second], 1)
        return (value, chosen, scores) if return_all_scores else (value, chosen)


class SwitchGate(NaiveGate):
    """Sends each token to one expert, weighted by its probability; experts have a capacity.

    Args:
        d_model: the size of a token.
        num_expert: experts of each worker.
        world_size: workers that share the experts.
        topk: 1 only.
        switch_eps: half the width of the noise on the scores in training; each worker draws from its own random stream.
        capacity: an expert takes at most this many times the number of tokens, in training and in evaluation.
        group: not used; the layer knows its workers.
    """

    def __init__(
        self,
        d_model: int,
        num_expert: int,
        world_size: int,
        topk: int = 1,
        switch_eps: float = 0.1,
        capacity: tuple[float, float] = (1.2, 2.4),
        group: Any = None,
    ) -> None:
        if topk != 1:
            raise ConfigError(
                f"SwitchGate(topk={topk!r}): switch sends each token to 1 expert. Set 1, or use NaiveGate."
            )
        super().__init__(d_model, num_expert, world_size, topk)
        self.switch_eps = switch_eps
        self.capacity = capacity

    def forward(self, inp: Tensor, return_all_scores: bool = False) -> Any:
        """Returns weights and indices, and keeps the loss ``sum(fraction * probability) * experts``."""
        scores = self.gate(inp)
        if self.training and self.switch_eps:
            scores = scores + torch.rand_like(scores) * 2 * self.switch_eps + (1.0 - self.switch_eps)
        scores = scores.softmax(-1)
        value, chosen = torch.topk(scores, 1, dim=-1)
        before, _, total = self.counted(chosen)
        capacity = math.ceil(self.capacity[0 if self.training else 1] * number_of(total[-1]))
        chosen = limited(chosen, before, capacity)
        kept = total[:-1].clamp(max=capacity)
        valid = max(number_of(kept.sum()), 1)
        probability = self.summed(scores.sum(0)) / valid
        self.set_loss((kept.to(probability.dtype) / valid * probability).sum() * self.tot_expert)
        return (value, chosen, scores) if return_all_scores else (value, chosen)


def number_of(count: Tensor) -> int:
    """Returns the value of a tensor of one number; estimates, whose tensors have none, replace this function."""
    return int(count)


def limited(chosen: Tensor, before: Tensor, capacity: int) -> Tensor:
    """Returns ``chosen`` with -1 where an expert is full.

    Args:
        chosen: the experts of each token.
        before: the number of tokens that each expert has from the workers before this one.
        capacity: the number of tokens that an expert takes.

    Example:
        >>> limited(torch.tensor([[0], [0], [1]]), torch.tensor([1, 0]), 2)
        tensor([[ 0],
                [-1],
                [ 1]])
    """
    flat = chosen.flatten()
    # Stable: among the choices of one expert the earlier tokens keep their places when it fills up.
    order = flat.argsort(stable=True)
    ranked = flat[order]
    # The place of each choice among those of its expert, in the order of the tokens.
    place = torch.arange(len(ranked), device=flat.device) - torch.searchsorted(ranked, ranked)
    full = place + before[ranked.clamp(min=0)] >= capacity
    return flat.scatter(0, order, ranked.masked_fill(full, -1)).view_as(chosen)
