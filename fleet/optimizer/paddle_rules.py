"""Paddle's rules of RMSProp, Adamax and ASGD, which differ from torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.clip import GradientClip
from fleet.errors import ConfigError
from fleet.optimizer.optimizer_arguments import Decay, Parameters, checked, with_steps_before
from fleet.strategies._shared.optimizer_wrapper import loss_of


class _Rule(Optimizer):
    """Updates each parameter separately; a subclass defines how. ``weight_decay`` is added to the gradient."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters that have a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise ConfigError(
                        f"{type(self).__name__} takes dense gradients and got a sparse one. Use SGD or Adam."
                    )
                decay = group["weight_decay"]
                # Not in place: .grad keeps its value without the L2 decay for code that reads it after the step.
                gradient = parameter.grad.add(parameter, alpha=decay) if decay else parameter.grad
                self.update(parameter, gradient, self.state[parameter], group)
        return loss

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Updates one parameter and its state."""
        raise NotImplementedError


class RMSProp(_Rule):
    """Paddle's RMSProp, whose epsilon is inside the root; torch's is outside.

    ``r = rho r + (1 - rho) g^2``; centered: ``c = rho c + (1 - rho) g``, otherwise ``c = 0``;
    ``v = momentum v + lr g / sqrt(r - c^2 + epsilon)``; ``p -= v``.
    """

    def __init__(
        self,
        learning_rate: float,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        momentum: float = 0.0,
        centered: bool = False,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
    ) -> None:
        groups = checked(learning_rate, parameters, weight_decay, grad_clip)
        self._check(rho, epsilon, momentum)
        rates = {"lr": learning_rate, "rho": rho, "eps": epsilon, "momentum": momentum, "centered": centered}
        super().__init__(groups, {**rates, "weight_decay": 0.0})
        with_steps_before(self, grad_clip)

    @staticmethod
    def _check(rho: float, epsilon: float, momentum: float) -> None:
        if not 0 <= rho < 1 or not epsilon > 0 or not momentum >= 0:
            raise ConfigError(
                f"RMSProp(rho={rho!r}, epsilon={epsilon!r}, momentum={momentum!r}): rho must be at least 0 and below "
                "1, epsilon above 0, momentum at least 0."
            )

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Updates one parameter, its mean square and its velocity."""
        rho = group["rho"]
        square = _zeros(state, "square_avg", parameter).mul_(rho).addcmul_(gradient, gradient, value=1 - rho)
        # A new tensor: epsilon and the mean must not add up in the state.
        denominator = square + group["eps"]
        if group["centered"]:
            mean = _zeros(state, "grad_avg", parameter).mul_(rho).add_(gradient, alpha=1 - rho)
            denominator.addcmul_(mean, mean, value=-1)
        update = gradient / denominator.sqrt_() * group["lr"]
        if group["momentum"]:
            update = _zeros(state, "momentum_buffer", parameter).mul_(group["momentum"]).add_(update)
        parameter.sub_(update)


class Adamax(_Rule):
    """Paddle's Adamax, which adds epsilon to the decayed maximum; torch adds it to the gradient's magnitude.

    ``m = beta1 m + (1 - beta1) g``; ``u = max(beta2 u + epsilon, |g|)``; ``p -= lr / (1 - beta1^t) m / u``.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: GradientClip | None = None,
        name: str | None = None,
    ) -> None:
        groups = checked(learning_rate, parameters, weight_decay, grad_clip)
        if not 0 <= beta1 < 1 or not 0 <= beta2 < 1 or not epsilon > 0:
            raise ConfigError(
                f"Adamax(beta1={beta1!r}, beta2={beta2!r}, epsilon={epsilon!r}): the betas must be at least 0 and "
                "below 1, epsilon above 0."
            )
        rates = {"lr": learning_rate, "betas": (beta1, beta2), "eps": epsilon}
        super().__init__(groups, {**rates, "weight_decay": 0.0})
        with_steps_before(self, grad_clip)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Updates one parameter, its mean and its maximum."""
        beta1, beta2 = group["betas"]
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        mean = _zeros(state, "exp_avg", parameter).mul_(beta1).add_(gradient, alpha=1 - beta1)
        # Epsilon goes into the state, as in Paddle, so that the next step decays it with the maximum.
        largest = _zeros(state, "exp_inf", parameter).mul_(beta2).add_(group["eps"])
        largest.copy_(torch.maximum(largest, gradient.abs()))
        parameter.sub_(mean / largest * (group["lr"] / (1 - beta1 ** float(state["step"]))))


class ASGD(_Rule):
    """Paddle's ASGD, the stochastic average gradient; torch's ASGD averages the parameters instead.

    With ``n = batch_num`` and step m = 0, 1, ...: ``i = m % n``; ``d = d - y_i + g``; ``y_i = g``;
    ``p -= lr d / min(m + 1, n)``. It keeps ``n`` gradients of each parameter.

    Source: Schmidt, Le Roux and Bach, 2017, Minimizing Finite Sums with the Stochastic Average Gradient.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        batch_num: int = 1,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: GradientClip | None = None,
        multi_precision: bool = False,
        name: str | None = None,
    ) -> None:
        groups = checked(learning_rate, parameters, weight_decay, grad_clip, multi_precision=multi_precision)
        if isinstance(batch_num, bool) or not isinstance(batch_num, int) or batch_num < 1:
            raise ConfigError(f"ASGD(batch_num={batch_num!r}): it must be an integer of at least 1.")
        super().__init__(groups, {"lr": learning_rate, "batch_num": batch_num, "weight_decay": 0.0})
        with_steps_before(self, grad_clip)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Updates one parameter, the sum of its last gradients and the oldest of them."""
        step = int(state.get("step", 0))
        count = group["batch_num"]
        state["step"] = torch.tensor(step + 1.0)
        oldest = _zeros(state, f"gradient_{step % count}", parameter)
        # The sum is kept: a step costs one addition and one subtraction, however many gradients are stored.
        # The stored gradient leaves the sum before it is overwritten.
        total = _zeros(state, "sum", parameter).add_(gradient).sub_(oldest)
        oldest.copy_(gradient)
        parameter.sub_(total, alpha=group["lr"] / min(step + 1, count))


def _zeros(state: dict[str, Any], key: str, parameter: Tensor) -> Tensor:
    """Returns the entry of a parameter's state, initially zeros."""
    if key not in state:
        state[key] = torch.zeros_like(parameter)
    return cast(Tensor, state[key])
