"""Parameters that every worker of the mp axis holds whole: they start equal, get equal gradients and stay equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.strategies._gradients.flat import average, broadcast_from_rank_0, chunks, flattened
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, followed_by
from fleet.strategies._shared.parameter_layout import layout_of, layouts_in
from fleet.strategies._shared.parts import local
from fleet.strategies.tensor_parallel.equal_inputs import Occasions

_FIRST = 2  # updates whose gradients are compared; later ones where their number is a power of two
# The allowed distance between two workers' gradients, relative to the norm, or to a share of the norm of all: some
# kernels of a GPU add up in any order. A gradient that lacks the other workers' terms differs by about its own norm.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_OF_16_BITS = 0.05
_SHARE = 1e-4


def whole_tensors(model: nn.Module) -> list[Tensor]:
    """Returns the parameters and buffers of ``model`` that are not divided, without those marked ``no_sync``."""
    divided = layouts_in(model)
    named = [*model.named_parameters(), *model.named_buffers()]
    return [tensor for name, tensor in named if name not in divided and not getattr(tensor, "no_sync", False)]


def is_whole(parameter: Tensor) -> bool:
    """Returns whether every worker of the mp axis holds ``parameter``."""
    return layout_of(parameter) is None and not getattr(parameter, "no_sync", False)


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """The values to make equal at a step, as ``hybrid_configs['mp_configs']`` says.

    Attributes:
        gradients: the gradients, before each step.
        parameters: the parameters, after it.
        moments: the optimizer's state, after it.
        averages: take the mean over the workers, and not the first worker's value.
        parts_of_names: acts on parameters whose names contain one of these; empty for all whole parameters.
    """

    gradients: bool
    parameters: bool
    moments: bool
    averages: bool
    parts_of_names: tuple[str, ...] = ()


class EqualOptimizer(OptimizerWrapper):
    """Steps the optimizer inside; checks the gradients of whole parameters, and applies :class:`Upkeep`.

    Args:
        optimizer: the optimizer inside.
        group: the workers of the mp axis.
        upkeep: the values to keep equal.
        names: returns the name of every parameter of the wrapped models.
    """

    def __init__(
        self, optimizer: Optimizer, group: dist.ProcessGroup, upkeep: Upkeep, names: Callable[[], Mapping[Tensor, str]]
    ) -> None:
        super().__init__(optimizer)
        self._group: dist.ProcessGroup | None = group
        self._upkeep = upkeep
        self._names = names
        self._occasions = Occasions(_FIRST)
        self._acts_on: list[Tensor] = []
        self._known = -1

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Steps the optimizer inside between the check and the upkeep.

        Raises:
            ConfigError: a whole parameter has different gradients on the workers.
        """
        if self._group is None:
            return super().step(closure)
        if closure is None:
            self._before()
        result = super().step(None if closure is None else followed_by(closure, self._before))
        self._after(self._group)
        return result

    def _before(self) -> None:
        group = self._group
        upkeep = self._upkeep
        assert group is not None
        whole = [p for p in self.parameters() if is_whole(p)]
        # A step that merges its gradients with later ones has none left to look at.
        if any(p.grad is not None for p in whole) and self._occasions.now():
            names = self._names()
            check_gradients([(names.get(p, f"a parameter of shape {list(p.shape)}"), p) for p in whole], group)
        if upkeep.gradients:
            self._make_equal([local(p.grad) for p in self._chosen() if p.grad is not None], group)

    def _after(self, group: dist.ProcessGroup) -> None:
        upkeep = self._upkeep
        if upkeep.parameters:
            self._make_equal([local(p.detach()) for p in self._chosen()], group)
        if upkeep.moments:
            self._make_equal(list(self._moments()), group)

    def _chosen(self) -> list[Tensor]:
        """Returns the parameters that the upkeep acts on.

        Raises ConfigError when names were asked for and fit none of them.
        """
        parameters = self.parameters()
        if self._known != len(parameters):
            self._known = len(parameters)
            whole = [p for p in parameters if is_whole(p)]
            parts = self._upkeep.parts_of_names
            names = self._names()
            self._acts_on = [p for p in whole if not parts or any(part in names.get(p, "") for part in parts)]
            if whole and not self._acts_on:
                known = ", ".join(repr(names[p]) for p in whole[:8] if p in names)
                raise ConfigError(
                    f"sync_param_name is {list(parts)!r}, and no undivided parameter has one of these in its name. "
                    f"Names, as in model.named_parameters(): {known}. Leave the option at its default for all of them."
                )
        return [p for p in self._acts_on if p.requires_grad]

    def _moments(self) -> Iterator[Tensor]:
        for p in self._chosen():
            entry = self.state.get(p, {})
            for name in sorted(entry, key=str):
                if isinstance(entry[name], Tensor) and entry[name].is_floating_point():
                    yield local(entry[name])

    def _make_equal(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        on_device = list(tensors)
        if dist.get_backend(group) == "nccl":  # a step count may be on the host
            on_device = [t for t in on_device if t.is_cuda]
        (average if self._upkeep.averages else broadcast_from_rank_0)(on_device, group)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_group": None, "_names": None, "_acts_on": [], "_known": -1}


@torch.no_grad()
def check_gradients(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Raises ConfigError on every worker of ``group`` when a parameter's gradients differ between them.

    Args:
        named: names and parameters, in the same order on every worker.
        group: the workers, which all hold these parameters.
    """
    dense = [(name, p) for name, p in named if p.grad is None or not p.grad.is_sparse]
    if not dense:
        return
    device = local(dense[0][1]).device
    # First who has a gradient: the exchange of values needs the same list on every worker.
    there = torch.tensor([p.grad is not None for _, p in dense], dtype=torch.int32, device=device)
    dist.all_reduce(there, group=group)
    counts = there.tolist()
    for (name, p), count in zip(dense, counts, strict=True):
        if 0 < count < group.size():
            has = "has one here" if p.grad is not None else "has none here"
            raise ConfigError(
                f"step(): {name!r} is held whole by the workers {dist.get_process_group_ranks(group)}, and only "
                f"{count} of them have a gradient of it (it {has}). Use it on every worker of the mp axis, or in none."
            )
    with_gradients = [
        (name, local(p.grad)) for (name, p), n in zip(dense, counts, strict=True) if n and p.grad is not None
    ]
    if not with_gradients:
        return
    apart = _distances([g for _, g in with_gradients], group).to(device)
    dist.all_reduce(apart, op=dist.ReduceOp.MAX, group=group)
    distance, norm = apart.cpu()
    floor = _SHARE * norm[norm.isfinite()].norm()
    wrong = [
        name
        for place, (name, g) in enumerate(with_gradients)
        if distance[place] > _TOLERANCE.get(g.dtype, _OF_16_BITS) * torch.maximum(norm[place], floor)
        and bool(norm[place].isfinite() & distance[place].isfinite())
    ]
    if wrong:
        raise ConfigError(_different(wrong, dist.get_process_group_ranks(group)))


def _distances(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Returns, for each gradient, its distance from the first worker's, and the norm of the first worker's."""
    order = {id(g): place for place, g in enumerate(gradients)}
    found = torch.zeros(2, len(gradients), dtype=torch.float64)
    for chunk in chunks(gradients):
        own = flattened(chunk)
        first = own.clone()
        dist.broadcast(first, group=group, group_src=0)
        sizes = [g.numel() for g in chunk]
        for g, mine, theirs in zip(chunk, own.float().split(sizes), first.float().split(sizes), strict=True):
            found[0, order[id(g)]] = torch.linalg.vector_norm(mine - theirs).cpu()
            found[1, order[id(g)]] = torch.linalg.vector_norm(theirs).cpu()
    return found


def _different(wrong: Sequence[str], ranks: Sequence[int]) -> str:
    shown = ", ".join(repr(name) for name in wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
    return (
        f"step(): the gradients of {shown} differ between the workers {list(ranks)}, which all hold the parameter "
        "whole. A parameter that is used on a part of the sequence, or inside divided heads or columns, gets the "
        "gradient of that part only: call mark_as_sequence_parallel_parameter(parameter) of "
        "fleet.utils.sequence_parallel_utils before distributed_model(), and the parts are added up. Otherwise the "
        "workers have seen other rows or labels (deal them out by fleet.data_rank() of fleet.data_replicas()), or "
        "other dropout masks of whole activations (draw those from the global stream, which is the same here)."
    )
