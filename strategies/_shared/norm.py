"""One norm, and one answer to "is anything not finite", over workers that hold one copy of the model together.

[Note: Counted once]
A norm over the mesh is one all-reduce of one number. Each worker adds up the squares of the gradients that it holds,
each divided by the number of workers, among those that take part, that hold the same values. An undivided parameter of
a layer is held by every worker along ``mp``; a divided one by one of them; a weight tied over pipeline stages by each
of its stages. The norm in a single process is the reference.

A worker that has no gradient takes part: its frozen stage would leave the others waiting.

[Note: torch's own clipping]
``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` see plain tensors, in which a part looks like a whole
parameter, and would return another norm on every worker. While a session divides a model, the function that both call
is replaced inside its decorator, so that names which a script has imported before reach it too. Tensors that are
neither parameters nor gradients of the session are treated as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grad

from fleet.errors import ConfigError
from fleet.job.axes import COPY_AXES, MODEL_AXES, Axes
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.parameter_layout import layout_of
from fleet.strategies._shared.parts import has_parts, is_part, local, rows_of, sums_over_parts

if TYPE_CHECKING:
    from fleet.job.job import Job

_ALL_AXES = (*COPY_AXES, *MODEL_AXES)
_WITH_OWNERS = ("pp", "sharding", "sep", "cp", "mp")  # a process group that every job has, and that holds the owners


def copies(parameter: Tensor, axes: Axes, over: Sequence[str] = MODEL_AXES, *, owned: bool = False) -> int:
    """Returns the divisor of the square of ``parameter`` with which a sum over the axes ``over`` counts it once.

    Args:
        parameter: whole, divided (it has a layout), a DTensor, or tied over stages (``fleet_tied``).
        axes: the mesh.
        over: the axes that are summed over.
        owned: whether one worker along ``sharding`` has the gradient, and the others have none.

    Example:
        >>> copies(torch.ones(2), Axes({"pp": 2, "mp": 2}, 0))
        2
    """
    layout = layout_of(parameter)
    distinct = axes.size("pp") if "pp" in over else 1
    if layout is not None:
        distinct *= layout.parts
    if is_part(parameter):
        distinct *= math.prod(parameter.device_mesh.size(dim) for dim in _sharded_dims(parameter))
    elif is_expert(parameter):
        distinct *= axes.size("ep") * (axes.size("moe_sharding") if owned else 1)
    elif owned:
        distinct *= axes.size("sharding")
    tied: Sequence[int] = parameter.__dict__.get("fleet_tied", ())
    return axes.size(*over) * max(len(tied), 1) // distinct


def total_norm(
    parameters: Iterable[Tensor], axes: Axes, norm_type: float = 2.0, over: Sequence[str] | None = None
) -> Tensor:
    """Returns the norm of the gradients of ``parameters`` over the mesh; every worker of a model copy must call it.

    Args:
        parameters: this worker's parameters; those without a gradient count as 0.
        axes: the mesh.
        norm_type: 2, another order above 0, or infinity.
        over: the axes whose workers take part; by default those that hold one copy together.
    """
    held = list(parameters)
    owners = [_owner_of(p) for p in held if p.grad is not None]
    gradients = [p.grad for p in held if p.grad is not None]
    device = held[0].device if held else torch.device("cpu")
    return _reduced(gradients, owners, axes, device, norm_type, over or _axes_of([*owners, *held], axes))


def _owner_of(parameter: Tensor) -> Tensor:
    """Returns the tensor in whose layout the gradient of ``parameter`` is: in stage 2 the rows of this worker."""
    owner: Tensor = rows_of(parameter) if is_part(parameter.grad) else parameter
    return owner


@torch.no_grad()
def any_nonfinite(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns, without waiting, 1.0 when a gradient on this worker holds an inf or nan, otherwise 0.0, on ``device``.

    :func:`everywhere` makes it the answer of all workers.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            values = gradient._values() if gradient.is_sparse else gradient
            if values.numel():
                kinds.setdefault((values.device, values.dtype), []).append(values)
    # The largest magnitude is not finite exactly when an element is not; unlike a sum of squares it cannot overflow.
    largest = [torch.stack(torch._foreach_norm(same, float("inf"))).max().float() for same in kinds.values()]
    if not largest:
        return torch.zeros((), device=device)
    ends = [value.to(device) for value in largest]
    return torch.stack(ends).isfinite().all().logical_not().float()


def everywhere(found: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns 1.0 when ``found`` is on any worker of ``group``; every one of them must call it."""
    if group is not None:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


class MeshNorm:
    """Norms of the gradients of one job, over its mesh.

    Args:
        job: knows the mesh and the parameters.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._owned = False

    @property
    def axes(self) -> Axes:
        """The mesh."""
        return self._job.axes

    def owners(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the parameter that each of ``tensors`` is, or is the gradient of; ``None`` for a stranger."""
        # By memory, not by identity: scripts pass p.grad.detach(), and clipping may get gradients or parameters.
        known: dict[Any, Tensor] = {}
        seen: set[int] = set()
        for parameters in (self._job.parameters(), *self._job.parameter_sets()):
            for parameter in parameters:
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                known[_memory(parameter)] = parameter
                if parameter.grad is not None:
                    known[_memory(parameter.grad)] = _owner_of(parameter)
        return [known.get(_memory(tensor)) for tensor in tensors]

    def total(self, tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor | None:
        """Returns the norm of ``tensors`` over the mesh, ``None`` where each worker has all of them.

        Raises ConfigError in a pipeline for a choice of tensors that other stages need not have.
        """
        axes = self.axes
        # torch takes no largest element of nothing, which some workers have of a parameter with few rows.
        perhaps_empty = norm_type == math.inf and has_parts(tensors)
        if not (axes.size(*MODEL_AXES, "ep") > 1 or self._owned or perhaps_empty):
            return None
        found = self.owners(tensors)
        if tensors and all(owner is None for owner in found):
            return None
        if axes.size("pp") > 1:
            self._check_all_stages(tensors, found)
        owners = [t if owner is None else owner for t, owner in zip(tensors, found, strict=True)]
        over = _WITH_OWNERS if self._owned else _axes_of(owners, axes)
        return _reduced(tensors, owners, axes, self._job.device, norm_type, over, owned=self._owned)

    def each(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the Euclidean norm of every one of ``tensors``, of the whole where it is a part, in float32."""
        owners = self.owners(tensors)
        return norms(list(tensors), [t if owner is None else owner for t, owner in zip(tensors, owners, strict=True)])

    @contextmanager
    def only_owned(self) -> Iterator[None]:
        """While it is open, a gradient is on the one worker along ``sharding`` that owns its parameter."""
        before = self._owned
        self._owned = True
        try:
            yield
        finally:
            self._owned = before

    def _check_all_stages(self, tensors: Sequence[Tensor], owners: Sequence[Tensor | None]) -> None:
        if not tensors or any(owner is None for owner in owners):
            return
        mine = {id(owner) for owner in owners}
        weights = any(tensor is owner for tensor, owner in zip(tensors, owners, strict=True))
        for parameters in self._job.parameter_sets():
            if mine == {id(p) for p in parameters if weights or p.grad is not None}:
                return
        raise ConfigError(
            f"clip_grad_norm_() or get_total_norm() got {len(tensors)} of the gradients of a pipeline stage. Workers "
            "of other stages hold other parameters, so a norm of some of them would mix different choices or wait for "
            "ever. Pass all parameters of the model, of the optimizer, or of one of its groups."
        )


_installed: list[tuple[MeshNorm, Callable[[], None]]] = []


def of_mesh() -> MeshNorm | None:
    """Returns the norms of the session that divides a model, ``None`` where no session does."""
    return _installed[-1][0] if _installed else None


def install(norms_of_session: MeshNorm) -> None:
    """Makes torch's clipping take the norm over the mesh; see [Note: torch's own clipping]."""
    remove()
    cell, plain = _decorated(clip_grad._get_total_norm)

    def over_mesh(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        total = norms_of_session.total(given, float(norm_type))
        if total is None:
            found: Tensor = plain(given, norm_type, error_if_nonfinite, foreach)
            return found
        if error_if_nonfinite and not bool(local(total).isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. Set error_if_nonfinite=False to scale by it anyway."
            )
        return total

    def restore() -> None:
        cell.cell_contents = plain

    cell.cell_contents = over_mesh
    _installed.append((norms_of_session, restore))


def remove(norms_of_session: MeshNorm | None = None) -> None:
    """Gives torch its function back; with ``norms_of_session``, only where these are installed."""
    if _installed and norms_of_session in (None, _installed[-1][0]):
        _installed.pop()[1]()


def _decorated(function: Callable[..., Any]) -> tuple[Any, Callable[..., Any]]:
    """Returns the cell in which torch's decorator keeps the decorated function, and that function."""
    plain: Callable[..., Any] | None = getattr(function, "__wrapped__", None)
    for cell in function.__closure__ or ():
        if plain is not None and cell.cell_contents is plain:
            return cell, plain
    raise AssertionError(f"torch {torch.__version__} defines torch.nn.utils.get_total_norm in another way")


@torch.no_grad()
def norms(tensors: list[Tensor], owners: Sequence[Tensor] = ()) -> Tensor:
    """Returns the Euclidean norm of each tensor in float32, shape [number of tensors].

    Args:
        tensors: whole tensors, or this worker's parts.
        owners: the parameter that each tensor belongs to; where it is divided among workers, the norm counts the whole,
            and every worker that shares it makes the call.
    """
    if not tensors:
        return torch.zeros(0)
    found = torch.stack(torch._foreach_norm([_values(t) for t in tensors]))
    mesh = of_mesh()
    divided = mesh is not None and any(layout_of(owner) is not None for owner in owners)
    if not divided and not has_parts(list(owners)):
        return found
    squares = sums_over_parts(found.square(), owners)
    return (squares if mesh is None else _sums_over_layouts(squares, owners, mesh.axes)).sqrt()


def _sums_over_layouts(values: Tensor, owners: Sequence[Tensor], axes: Axes) -> Tensor:
    """Returns ``values``, one for each of ``owners``, summed over the workers that hold the other parts of it."""
    places: dict[str, list[int]] = {}
    for place, owner in enumerate(owners):
        layout = layout_of(owner)
        if layout is not None:
            places.setdefault(layout.axis, []).append(place)
    # In sorted order, so that workers exchange along several axes in one order.
    for axis in sorted(places):
        group = axes.group(axis)
        if group is not None:
            index = torch.tensor(places[axis], device=values.device)
            part = values[index]
            dist.all_reduce(part, group=group)
            values = values.index_copy(0, index, part)
    return values


@torch.no_grad()
def _reduced(
    tensors: Sequence[Tensor],
    owners: Sequence[Tensor],
    axes: Axes,
    device: torch.device,
    order: float,
    over: Sequence[str],
    *,
    owned: bool = False,
) -> Tensor:
    """Returns the norm of ``tensors`` over the workers along ``over``, as a DTensor where they are DTensors."""
    if not order > 0:
        raise ConfigError(f"The norm of a divided model has an order above 0 (norm_type), got {order!r}.")
    group = axes.group(*over)
    held = [_values(tensor) for tensor in tensors]
    exact = [values if values.numel() else values.new_zeros(1) for values in held]
    each = [value.to(device) for value in torch._foreach_norm(exact, order)] if exact else []
    # In float64, so that a square overflows only where the norm itself is beyond float32.
    powers = torch.stack(each).double() if each else torch.zeros(1, dtype=torch.float64, device=device)
    if order == math.inf:
        total = powers.max()
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group) if group is not None else None
    else:
        shares = [1.0 / copies(owner, axes, over, owned=owned) for owner in owners] or [1.0]
        total = (powers.pow(order) * torch.tensor(shares, dtype=torch.float64, device=device)).sum()
        dist.all_reduce(total, group=group) if group is not None else None
        total = total.pow(1 / order)
    result = total.to(tensors[0].dtype if tensors and tensors[0].dtype == torch.float64 else torch.float32)
    return _replicated(result, tensors[0]) if tensors else result


def _replicated(value: Tensor, like: Tensor) -> Tensor:
    """Returns ``value`` as a DTensor where ``like`` is one: torch scales DTensors by nothing else."""
    if not is_part(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _axes_of(owners: Sequence[Tensor], axes: Axes) -> Sequence[str]:
    if axes.size("ep") > 1:
        return _ALL_AXES
    return _WITH_OWNERS if any(is_part(owner) for owner in owners) else MODEL_AXES


def _sharded_dims(parameter: Any) -> list[int]:
    return [dim for dim, placement in enumerate(parameter.placements) if placement.is_shard()]


def _values(tensor: Tensor) -> Tensor:
    """Returns the numbers of ``tensor`` on this worker, in float32 or wider."""
    held = local(tensor)
    held = held.coalesce().values() if held.is_sparse else held
    return held if held.dtype in (torch.float32, torch.float64) else held.float()


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    """Returns a key that two names of one tensor share, as ``p.grad`` and ``p.grad.detach()`` do."""
    held = local(tensor)
    if held.is_sparse or not held.numel():
        return (id(tensor),)
    return held.data_ptr(), held.dtype, tuple(held.shape)
