"""Rules for parts that a script uses outside their model: the result is that for the whole tensor, or an error.

[Note: torch's DTensor]
Parts are DTensors of torch, and some operations of a DTensor see one worker's numbers alone. ``keep_part_rules``
changes these in torch's class, once and for every part of the process. ``.item()``, ``float()`` and ``bool()`` end in
one operation, and so does each draw: torch's dispatcher takes a handler for an operation, a private interface, whose
test fails where torch changes it.

[Note: Views of rows]
Operations that torch cannot compute on a part, or computes wrongly, run on the whole tensor, on every worker. A view
along the rows of a part (``grad[0]``, ``grad[1:3]``, ``split``) is whole, too. It remembers its part: after an
operation that writes into it, or into a view of it, each worker copies back the rows that it owns.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from fleet.errors import ConfigError
from fleet.job.whereabouts import user_line
from fleet.strategies._shared import through_host
from fleet.strategies._shared.parts import chunk_of, part_like

_divisors: dict[Any, float] = {}
_aten = torch.ops.aten
_DRAWS = (
    _aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.bernoulli.default,
    _aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype,
)  # fmt: skip


def keep_part_rules(mesh: Any, divisor: float, whole_parameters: bool = False) -> None:
    """Makes the rules hold for all DTensors; see [Note: torch's DTensor].

    Args:
        mesh: the workers that share a model.
        divisor: divides the sum of their gradients.
        whole_parameters: plain tensors may meet parts, as in ``p.grad.add_(p, alpha=0.1)``: they are alike everywhere.
    """
    DTensor._op_dispatcher._allow_implicit_replication = whole_parameters
    dispatcher: Any = DTensor._op_dispatcher
    dispatcher._dispatch_fast_path_python_tail = partial(_tail, type(dispatcher)._dispatch_fast_path_python_tail)
    _install_views()
    if whole_parameters:
        _let_parts_into_whole()
        warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1", UserWarning)
    _divisors[mesh] = divisor
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[_aten._local_scalar_dense.default] = _number
    handlers.update({operation: _drawn for operation in _DRAWS})
    for name, rule in {"full_tensor": _full_tensor, "data": property(_data, _assign), "__format__": _format}.items():
        setattr(DTensor, name, rule)


def _let_parts_into_whole() -> None:
    """Lets ``p.sub_(p.grad)`` and ``p.data = p.data - p.grad`` write the whole of a part into a whole parameter."""
    nn.Parameter.data = property(_data, _assign_whole)  # type: ignore[assignment]


def _tail(torchs: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any) -> Any:
    """Returns the whole tensor that ``operation`` has written; torch returns parts alone."""
    written = kwargs.get("out", args[0] if args else None)
    if operation._schema.is_mutable and type(written) in (Tensor, nn.Parameter):
        return written
    result = torchs(DTensor._op_dispatcher, operation, args, kwargs, *rest)
    if operation._schema.is_mutable:
        note_write(written)
    return result


@torch.no_grad()
def _assign_whole(parameter: nn.Parameter, value: Any) -> None:
    whole = _full_tensor(value) if isinstance(value, DTensor) else value
    torch._C.TensorBase.data.__set__(parameter, whole)  # type: ignore[attr-defined]


def _full_tensor(part: DTensor, *, grad_placements: Any = None) -> Tensor:
    """Returns the whole of ``part``; a collective call, and one in backward.

    Its gradient is exchanged as those of other parameters are, so each worker may use it with other rows.
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
    part = args[0]
    in_place = operation._schema.is_mutable
    whole = torch.empty(part.shape, dtype=part.dtype, device=part.to_local().device)
    if operation is _aten.bernoulli.default:
        whole = through_host.full_tensor(part)  # the tensor holds the probabilities
    drawn = part_like(operation(whole, *args[1:], **kwargs), part)
    if not in_place:
        return drawn
    part.to_local().copy_(drawn.to_local())
    return part


def _format(part: DTensor, spec: str) -> str:
    return format(part.item(), spec) if part.dim() == 0 else object.__format__(part, spec)


def _data(tensor: Tensor) -> Tensor:
    data: Tensor = torch._C.TensorBase.data.__get__(tensor)  # type: ignore[attr-defined]
    return data


def _assign(part: DTensor, value: Any) -> None:
    """Writes ``value`` into the memory of ``part``; torch would change an object that nothing reads."""
    is_alike = isinstance(value, DTensor) and (value.shape, value.device_mesh) == (part.shape, part.device_mesh)
    # A whole parameter may be converted there and back, and its gradient with it.
    is_alike = is_alike and (value.dtype == part.dtype or DTensor._op_dispatcher._allow_implicit_replication)
    if not is_alike:
        shown = f" of shape {list(value.shape)} and type {value.dtype}" if isinstance(value, Tensor) else ""
        found = f"{type(value).__name__}{shown}"
        raise ConfigError(
            f"{user_line()}: .data of a sharded tensor of shape {list(part.shape)} and type {part.dtype} was assigned "
            f"a {found}. Assign what was computed from .data itself, in its shape and type; load whole tensors with "
            "model.load_state_dict(); convert the model before distributed_model()."
        )
    with torch.no_grad():
        part.to_local().copy_(value.redistribute(placements=part.placements).to_local())


_VIEWS = (
    _aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int,
)  # fmt: skip
# Left to torch, a loss would be the mean of the workers' means, though they have unlike numbers of rows; the others
# would see one worker's rows alone.
_ON_WHOLE = (
    _aten.mse_loss.default, _aten.huber_loss.default, _aten.smooth_l1_loss.default, _aten.soft_margin_loss.default,
    _aten.binary_cross_entropy.default, _aten.binary_cross_entropy_with_logits.default, _aten.convolution.default,
    _aten.fill_.Tensor, _aten.index_put_.default, _aten.index_fill_.int_Scalar, _aten.index_fill_.int_Tensor,
    _aten.index_add_.default, _aten.index_copy_.default, _aten.scatter_.src, _aten.scatter_.value,
    _aten.scatter_add_.default, _aten.tril_.default, _aten.triu_.default, _aten.renorm_.default,
)  # fmt: skip


@dataclass(frozen=True)
class _View:
    """A view along the divided dimension of ``part``, whole on this worker.

    ``rows`` lists its places in that dimension; ``None`` for views that mix rows, which cannot be written back.
    """

    part: DTensor
    rows: Tensor | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


_views: WeakKeyDictionary[Any, _View] = WeakKeyDictionary()  # by the memory of the view


def _install_views() -> None:
    """Makes views and whole operations hold for all DTensors; see [Note: Views of rows]."""
    dispatcher: Any = DTensor._op_dispatcher
    handlers: Any = dispatcher._custom_op_handlers
    handlers.update({operation: _view for operation in _VIEWS})
    handlers.update({operation: _on_whole for operation in _ON_WHOLE})
    torchs = type(dispatcher)._propagate_op_sharding_dispatch_slow_path
    dispatcher._propagate_op_sharding_dispatch_slow_path = partial(_propagate, torchs)
    for name in ("numpy", "tolist"):
        setattr(DTensor, name, partial(_refuse, name))


def note_write(written: Any) -> None:
    """Copies writes into views of parts back into the parts; every worker has written the same."""
    for one in tree_leaves(written) if _views else ():
        if isinstance(one, DTensor):
            memory = one.to_local().untyped_storage()
            view = _views.get(memory)
            if view is not None:
                _write_back(view, memory)


@torch.no_grad()
def _write_back(view: _View, memory: Any) -> None:
    if view.rows is None:
        raise ConfigError(
            f"{user_line()}: a sharded tensor whose rows are not divided evenly was flattened, and the result was "
            "written into, which does not reach the tensor. Write into the tensor itself, as in grad[0, 2] = 0."
        )
    local = view.part.to_local()
    dim = _divided_dim(view.part)
    assert dim is not None
    # The write may have gone through a view of the view: the memory, read in the view's own layout, has it.
    whole = torch.empty(0, dtype=local.dtype, device=local.device)
    whole.set_(memory, view.offset, view.size, view.stride)
    begin = _begin(view.part, dim)
    own = (view.rows >= begin) & (view.rows < begin + local.shape[dim])
    places = (view.rows[own] - begin).to(local.device)
    if view.rows.dim():
        local.index_copy_(dim, places, whole.index_select(dim, own.nonzero().flatten().to(local.device)))
    elif len(places):
        local.select(dim, int(places)).copy_(whole)
    note_write(view.part)  # which may be a view itself


def _propagate(torchs: Any, operation: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
    """Returns how torch divides the result of ``operation``, or the result itself where torch cannot divide it."""
    try:
        return torchs(DTensor._op_dispatcher, operation, args, kwargs, info, try_cache)
    except (NotImplementedError, RuntimeError):
        if not all(map(_is_part, filter(_is_dtensor, tree_leaves((args, kwargs))))):
            raise
        return _on_whole(operation, args, kwargs)


def _on_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of ``operation`` with whole tensors; a collective call."""
    first = next(filter(_is_dtensor, tree_leaves((args, kwargs))))
    whole_args, whole_kwargs = tree_map_only(DTensor, through_host.full_tensor, (args, kwargs))
    result = operation(*whole_args, **whole_kwargs)
    if operation._schema.is_mutable and _is_dtensor(args[0]):
        args[0].to_local().copy_(part_like(result, args[0]).to_local())
        note_write(args[0])
        return args[0]
    wrap = partial(_remembered, first, rows=None) if operation._schema._is_view_op() else partial(_replicated, first)
    return tree_map_only(Tensor, wrap, result)


def _view(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part = args[0]
    divided = _divided_dim(part)
    place = 2 if "split" in operation._schema.name else 1
    dim = (args[place] if len(args) > place else kwargs.get("dim", 0)) % part.dim()
    if divided is None or dim != divided:
        shift = divided is not None and dim < divided and operation in (_aten.select.int, _aten.unbind.int)
        return _local_view(operation, args, kwargs, 0 if divided is None else divided - shift)
    whole = through_host.full_tensor(part)
    values = operation(whole, *args[1:], **kwargs)
    # The same view of the numbers 0, 1, 2, ... says which rows each result has.
    along = [*args[1:]]
    if len(args) > place:
        along[place - 1] = 0
    rows = operation(torch.arange(part.shape[dim]), *along, **{**kwargs, **({"dim": 0} if "dim" in kwargs else {})})
    if isinstance(values, Tensor):
        return _remembered(part, values, rows)
    return [_remembered(part, value.clone(), own) for value, own in zip(values, rows, strict=True)]


def _local_view(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], divided: int) -> Any:
    """Returns a view along another dimension, in the memory of the part; ``divided`` is the view's divided one."""
    part = args[0]
    placements = [Shard(divided) if place.is_shard() else place for place in part.placements]

    def wrap(value: Tensor, like: Tensor) -> DTensor:
        size = like.shape
        stride = like.stride()
        return DTensor.from_local(value, part.device_mesh, placements, run_check=False, shape=size, stride=stride)

    # On meta tensors the operation gives the whole's shape and stride, which from_local() cannot know.
    likes = operation(torch.empty(part.shape, device="meta"), *args[1:], **kwargs)
    values = operation(part.to_local(), *args[1:], **kwargs)
    return wrap(values, likes) if isinstance(values, Tensor) else list(map(wrap, values, likes))


def _replicated(part: DTensor, value: Tensor) -> DTensor:
    return DTensor.from_local(value, part.device_mesh, [Replicate()] * part.device_mesh.ndim, run_check=False)


def _remembered(part: DTensor, value: Tensor, rows: Tensor | None) -> DTensor:
    """Returns ``value``, which every worker has, as a view of ``part``."""
    made = _replicated(part, value)
    known = _View(part, rows, tuple(value.shape), value.stride(), int(value.storage_offset()))
    _views[value.untyped_storage()] = known
    return made


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, DTensor)


def _divided_dim(part: DTensor) -> int | None:
    """Returns the dimension that is divided over workers; ``None`` where each has the whole."""
    return next((place.dim for place in part.placements if isinstance(place, Shard)), None)


def _is_part(part: DTensor) -> bool:
    """Returns whether ``part`` is whole, or divided over the last dimension of its mesh, as parts are here."""
    *copies, last = part.placements
    return all(place.is_replicate() for place in copies) and (last.is_replicate() or type(last) is Shard)


def _begin(part: DTensor, dim: int) -> int:
    """Returns the first place of this worker's chunk in the divided dimension ``dim``."""
    mesh = part.device_mesh
    last = mesh.ndim - 1
    return chunk_of(part.shape[dim], mesh.get_local_rank(last), mesh.size(last)).start  # type: ignore[no-any-return]


def _refuse(name: str, *_: Any) -> Any:
    raise ConfigError(
        f"{user_line()}: .{name}() of a sharded tensor would need the rows of other workers. Call .full_tensor() "
        f"first, on every worker, as in p.grad.full_tensor().cpu().{name}()."
    )
