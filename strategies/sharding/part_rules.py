"""What scripts do with a part outside its model: they get what the whole would give, or an error.

[Note: torch's DTensor]
Parts are DTensors of torch, of which some operations see one worker's numbers alone. ``keep_part_rules`` changes these
in torch's class, once and for every part of the process. ``.item()``, ``float()`` and ``bool()`` end in one operation,
and so does each draw: torch's dispatcher takes a handler for an operation, a private interface, whose test fails where
torch changes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fleet.errors import ConfigError
from fleet.job.whereabouts import user_line
from fleet.strategies._shared import through_host
from fleet.strategies._shared.parts import part_like

_divisors: dict[Any, float] = {}
_aten = torch.ops.aten
_DRAWS = (
    _aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.bernoulli.default,
    _aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype,
)  # fmt: skip


def keep_part_rules(mesh: Any, divisor: float) -> None:
    """Makes the rules hold for all DTensors; see [Note: torch's DTensor].

    Args:
        mesh: the workers that share a model.
        divisor: what the sum of their gradients is divided by.
    """
    _divisors[mesh] = divisor
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[_aten._local_scalar_dense.default] = _number
    handlers.update({operation: _drawn for operation in _DRAWS})
    for name, rule in {"full_tensor": _full_tensor, "data": property(_data, _assign), "__format__": _format}.items():
        setattr(DTensor, name, rule)


def _full_tensor(part: DTensor, *, grad_placements: Any = None) -> Tensor:
    """Returns the whole of ``part``; a collective call, and one in backward.

    Its gradient is exchanged as those of other parameters are, so a worker may use it with rows of its own.
    """
    whole = through_host.full_tensor(part, grad_placements=grad_placements)
    if whole.requires_grad and grad_placements is None:
        whole.register_hook(lambda gradient: _exchanged(gradient, part.device_mesh))
    return whole


@torch.no_grad()
def _exchanged(gradient: Tensor, mesh: Any) -> Tensor:
    total: Tensor = gradient / _divisors.get(mesh, mesh.size())
    for dim in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(dim))
    return total


def _number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part = args[0]
    if not all(place.is_replicate() or part.device_mesh.size(dim) == 1 for dim, place in enumerate(part.placements)):
        raise ConfigError(
            f"{user_line()}: .item(), float() or bool() of a sharded tensor would give the number of this worker's "
            "shard. Call .full_tensor() first, on every worker, as in p.grad.norm().full_tensor().item(); clip with "
            "torch.nn.utils.clip_grad_norm_(), which returns the whole norm; or set sharding_configs['stage'] to 1."
        )
    return operation(part.to_local())


def _drawn(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draws a whole tensor on every worker, so that workers with one seed hold parts of what one process draws."""
    part, in_place = args[0], operation._schema.is_mutable
    whole = torch.empty(part.shape, dtype=part.dtype, device=part.to_local().device)
    if operation is _aten.bernoulli.default:
        whole = through_host.full_tensor(part)  # its probabilities
    drawn = part_like(operation(whole, *args[1:], **kwargs), part)
    if not in_place:
        return drawn
    part.to_local().copy_(drawn.to_local())
    return part


def _format(part: DTensor, spec: str) -> str:
    return format(part.item(), spec) if part.dim() == 0 else object.__format__(part, spec)


def _data(part: DTensor) -> Tensor:
    data: Tensor = torch._C.TensorBase.data.__get__(part)  # type: ignore[attr-defined]
    return data


def _assign(part: DTensor, value: Any) -> None:
    """Writes ``value`` into the memory of ``part``; torch would change an object that nothing reads."""
    kinds = [(one.shape, one.dtype, one.device_mesh) for one in (part, value) if isinstance(one, DTensor)]
    if len(kinds) < 2 or kinds[0] != kinds[1]:
        shown = f" of shape {list(value.shape)} and type {value.dtype}" if isinstance(value, Tensor) else ""
        found = f"{type(value).__name__}{shown}"
        raise ConfigError(
            f"{user_line()}: .data of a sharded tensor of shape {list(part.shape)} and type {part.dtype} was assigned "
            f"a {found}. Assign what was computed from .data itself, in its shape and type; load whole tensors with "
            "model.load_state_dict(); convert the model before distributed_model()."
        )
    with torch.no_grad():
        part.to_local().copy_(value.redistribute(placements=part.placements).to_local())
