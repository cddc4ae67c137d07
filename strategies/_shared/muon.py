"""Muon: momentum, made orthogonal before it is applied; of whole matrices, also where a layer is divided over mp.

Source: Keller Jordan et al., 2024, Muon: An optimizer for hidden layers in neural networks,
kellerjordan.github.io/posts/muon, and KellerJordan/Muon on GitHub; the same as ``torch.optim.Muon``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from fleet.errors import ConfigError
from fleet.strategies._gradients.flat import chunks, flattened
from fleet.strategies._shared.norm import of_mesh
from fleet.strategies._shared.optimizer_wrapper import loss_of
from fleet.strategies._shared.parameter_layout import layout_of

# Of the quintic iteration: chosen for the steepest slope at zero, not for convergence to 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7


class MuonRule(Optimizer):
    """Updates matrices with Muon and everything else with AdamW; a group says which under ``use_muon``.

    With gradient g, momentum m, learning rate lr and decay wd, for a matrix p of A rows and B columns::

        v = m v + (1 - m) g
        u = m v + (1 - m) g   with nesterov, else v
        p = (1 - lr wd) p - lr sqrt(max(1, A / B)) orthogonal(u)

    A tensor of more than two dims, in a group with ``use_muon``, counts as the matrix of its first dim by the rest.
    Where a weight is divided over ``mp``, u is gathered, made orthogonal as a whole, and this worker's part is kept.

    Args:
        groups: parameter groups with every key of ``muon`` or of ``adamw`` that is not to be the default.
        muon: the defaults of groups with ``use_muon``.
        adamw: the defaults of the others.
        dtype: the type in which the iteration computes.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], muon: dict[str, Any], adamw: dict[str, Any], dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        made = [{**(muon if group["use_muon"] else adamw), **group} for group in groups]
        super().__init__(made, {**adamw, **muon, "use_muon": False})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_dtype", torch.bfloat16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters that have a gradient; returns the closure's loss."""
        loss = loss_of(closure)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise ConfigError("Muon takes dense gradients and got a sparse one. Use SGD or Adam for embeddings.")
            if parameters:
                (self._orthogonal if group["use_muon"] else self._adamw)(group, parameters)
        return loss

    def _orthogonal(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        momentum = group["momentum"]
        updates = []
        for parameter in parameters:
            gradient = _gradient(parameter)
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            velocity = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
            updates.append(gradient.lerp(velocity, momentum) if group["nesterov"] else velocity)
        for parameter, update in zip(parameters, gathered(updates, parameters), strict=True):
            matrix = update.flatten(1)
            step = orthogonal(matrix, group["ns_steps"], self._dtype).view_as(update)
            layout = layout_of(parameter)
            own = step if layout is None else layout.part(step)
            lr = float(group["lr"])
            parameter.mul_(1 - lr * group["weight_decay"])
            parameter.add_(own, alpha=-lr * math.sqrt(max(1, matrix.shape[0] / matrix.shape[1])))

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[p] for p in parameters]
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [_gradient(p) for p in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Returns ``matrix`` with singular values near 1, by ``steps`` of the quintic Newton-Schulz iteration.

    Example:
        >>> orthogonal(torch.eye(2) * 3, 5, torch.float32).diagonal().round(decimals=2)
        tensor([1.1100, 1.1100])
    """
    a, b, c = COEFFICIENTS
    # Of a wide matrix the Gram matrix has the size of the shorter side.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def gathered(updates: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the whole of each of ``updates``, whose parts lie as ``parameters`` do; a collective call."""
    mesh = of_mesh()
    made = dict(enumerate(updates))
    by_axis: dict[str, list[int]] = {}
    for place, parameter in enumerate(parameters):
        layout = layout_of(parameter)
        if layout is not None:
            by_axis.setdefault(layout.axis, []).append(place)
    for axis, places in sorted(by_axis.items()):
        group = None if mesh is None else mesh.axes.group(axis)
        if group is None:
            raise AssertionError(f"a parameter is divided over {axis!r}, and no job with that axis is running")
        for chunk in chunks([updates[place] for place in places]):
            flat = flattened(chunk)
            parts = [torch.empty_like(flat) for _ in range(group.size())]
            dist.all_gather(parts, flat, group=group)
            split = [part.split([t.numel() for t in chunk]) for part in parts]
            for at, tensor in enumerate(chunk):
                place = next(p for p in places if updates[p] is tensor)
                layout = layout_of(parameters[place])
                assert layout is not None
                made[place] = layout.joined([pieces[at].view_as(tensor) for pieces in split])
    return [made[place] for place in range(len(updates))]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
