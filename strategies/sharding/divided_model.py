"""Stage 3: a module whose parameters and gradients ``fully_shard`` divides, and the optimizer of its parts.

[Note: New parameters]
``fully_shard`` puts new parameters (DTensors) in the place of the user's. An optimizer that was made before holds the
old parameters, which nothing reads any more: it would step without an error and move nothing. ``divide_model``
therefore returns which parameter took the place of which, and sharding points the optimizers to them.

[Note: Hooks of parameters]
In backward the gradient arrives at the gathered parameter, a third tensor. A hook on a parameter (``register_hook``:
loss scaling, a user's own clipping) stands on the new one or, from before, on the old one, and torch would call
neither. The hooks of the old parameters move to the new ones, and every gathered parameter calls those of its part:
with the whole gradient of this worker, before the exchange, as in data parallel.

Between forward and backward, with ``find_unused_parameters``, ``named_parameters()`` of the divided module gives
gathered parameters, whose ``.grad`` is not the one that the optimizer uses. They carry a mark, by which the model that
users hold always gives the parts.

[Note: Unused parameters]
With ``find_unused_parameters`` each worker may run other units, and nobody knows in advance which. So all units are
gathered before the first one runs, and stay until backward has ended. Then the workers say which parameters have a
gradient, in one small exchange, and reduce all units in one order. A parameter with a gradient on another worker alone
counts with zeros; a parameter without any keeps ``None``, so that no rule moves it, as in one process.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fleet.common.outside_graphs import outside_graphs
from fleet.errors import ConfigError
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._gradients.passes import passes_of
from fleet.strategies._gradients.viewed import hook_viewed
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parts import is_part, mark_gathered, optimizer_state_like, part_like, part_of
from fleet.strategies.sharding.exchanging_module import ExchangingModule
from fleet.strategies.sharding.part_rules import keep_part_rules
from fleet.strategies.sharding.unit_order import AgreedGather, AgreedReduce, UnitOrder


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a module is divided.

    Attributes:
        mesh: the workers that share one copy; with two dims the first holds copies of the second.
        process_group: all workers of the mesh.
        divisor: divides the sum of the gradients over all workers; ``None`` is their number.
        sum_first: sum and divide afterwards, where the backend could average in the reduction.
        offload: keep parts, gradients and optimizer state in host memory.
        find_unused: workers may use other parameters; see [Note: Unused parameters].
        order: the order of units, without ``find_unused``.
    """

    mesh: DeviceMesh
    process_group: Any
    divisor: float | None = None
    sum_first: bool = False
    offload: bool = False
    find_unused: bool = False
    order: UnitOrder | None = None


_SHOWN = 6  # names in a message
_PLAIN = (Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


def _check_output(output: Any) -> None:
    """Raises ConfigError when tensors may hide in ``output``: backward through them would be missed."""
    leaves = tree_leaves(output)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return
    hidden = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)]
    if hidden:
        raise ConfigError(
            f"sharding stage 3 finds tensors in tuples, lists and dicts, and forward() returned {hidden[0]} "
            "without any beside it; its gradients would stay on each worker. Return the tensors themselves, make the "
            "class known with torch.utils._pytree.register_dataclass, or set sharding_configs['stage'] to 1 or 2."
        )


class DividedModule(ExchangingModule):
    """Runs a module that ``fully_shard`` divided; buffers are rank 0's before each training forward."""

    def __init__(self, module: nn.Module, division: Division) -> None:
        super().__init__(module, division.process_group)
        self._find_unused = division.find_unused
        self._roots = [m for m in module.modules() if isinstance(m, FSDPModule)]
        named = {unit: name for name, unit in module.named_modules()}
        self._units = [GatheredUnit(root, named[root], self.count_passes) for root in self._roots]
        # FSDP2 gathers in a pre-hook of its own, which comes first: fully_shard() has registered it already.
        for root, unit in zip(self._roots, self._units, strict=True):
            root.register_forward_pre_hook(unit)
            keep_backward_of_views(root)
            if division.order is not None:
                unit.follow(division.order)
        if division.find_unused:
            self._reduce_late()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        self._follow_memory()
        self.share_buffers()
        try:
            output = self.module(*args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise _read_from_outside(error) from error
        if torch.is_grad_enabled():
            _check_output(output)
        else:
            # Backward would give the gathered parameters up. Without one, the next step would change the parts and
            # leave the gathered copies as they are, and model.parameters() would not be those of the optimizer.
            self.reshard()
        return output

    @outside_graphs
    def reshard(self) -> None:
        """Gives up every gathered parameter; the module holds its parts only."""
        for root in self._roots:
            root.reshard()

    def check_memory(self) -> None:
        """Raises ConfigError when a gathered parameter was written or moved, which its part would not see."""
        for unit in self._units:
            unit.check_memory()

    @outside_graphs
    def _follow_memory(self) -> None:
        """Gathers from where the parts are now: a conversion of one layer there and back has moved them."""
        for root in self._roots:
            state: Any = root._get_fsdp_state()
            units = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            for unit in filter(None, units):
                for one in unit.fsdp_params:
                    own = one.sharded_param._local_tensor
                    if own.numel() and own.data_ptr() != one._sharded_param_data.data_ptr():
                        one.reset_sharded_param()

    def set_exchanges(self, exchanges: bool) -> None:
        """Sets whether backward exchanges gradients, or adds them up on each worker for a later backward."""
        if exchanges != self.exchanges:
            super().set_exchanges(exchanges)
            # With find_unused FSDP2 exchanges nothing by itself: _reduce() looks at ``exchanges`` after the pass.
            if not self._find_unused:
                cast(FSDPModule, self.module).set_requires_gradient_sync(exchanges)

    def has_local(self) -> bool:
        """Returns whether gradients are here that no backward pass has exchanged yet."""
        return any(unit.has_local() for unit in self._units)

    def local_gradients(self, parameters: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields the gradients of ``parameters`` that no backward pass has exchanged yet."""
        wanted = set(parameters)
        for unit in self._units:
            yield from unit.local_gradients(wanted)

    def drop_local(self, parameters: Iterable[Tensor]) -> None:
        """Drops the gradients of ``parameters`` that no backward pass has exchanged yet."""
        dropped = set(parameters)
        for unit in self._units:
            unit.drop_local(dropped)

    def _reduce_late(self) -> None:
        """Gathers all units before one runs, and reduces them after backward; see [Note: Unused parameters]."""
        root = cast(FSDPModule, self.module)
        passes = passes_of(self)
        # FSDP2 would exchange each unit as this worker's backward comes to it, and others may not come to it at all.
        self.module.register_forward_pre_hook(lambda *_: self._gather())
        root.set_requires_gradient_sync(False)
        root.set_reshard_after_backward(False)
        for one, unit in zip(self._roots, self._units, strict=True):
            one.set_modules_to_backward_prefetch([one])  # nothing: it is gathered already
            unit.begins = passes.begin
        passes.starts.append(self._gather)
        # FSDP2 ends the pass in another callback, which may be queued later than this one.
        passes.ends.append(lambda: torch.autograd.Variable._execution_engine.queue_callback(self._reduce))

    @outside_graphs
    def _gather(self) -> None:
        for root, unit in zip(self._roots, self._units, strict=True):
            # unshard() runs no pre-hooks of forward, so the unit is told here of its gathered parameters.
            root.unshard()
            unit(root, ())

    @torch.no_grad()
    def _reduce(self) -> None:
        """Reduces the gradients of parameters that any worker has used, and gives the gathered copies up."""
        gathered = [p for unit in self._units for p in unit.gathered() if p.requires_grad]
        if self.exchanges and gathered:
            flags = torch.tensor([p.grad is not None for p in gathered], dtype=torch.uint8)
            used = flags.to(gathered[0].device)
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.process_group)
            for p, is_used in zip(gathered, used.tolist(), strict=True):
                if is_used and p.grad is None:
                    p.grad = torch.zeros_like(p)
            # The callback reduces whatever units still hold, but only while the sync is on.
            root = cast(FSDPModule, self.module)
            root.set_requires_gradient_sync(True)
            root._get_fsdp_state()._root_post_backward_final_callback()
            root.set_requires_gradient_sync(False)
        self.reshard()

    def count_passes(self) -> int | None:
        """Returns the number of the backward pass under way that exchanges gradients; ``None`` in others."""
        passes = passes_of(self)
        return passes.begun if passes.running and self.exchanges else None


class GatheredUnit:
    """Makes gathered parameters of a unit call the hooks of their parts; see [Note: Hooks of parameters].

    Attributes:
        begins: called when a gradient arrives.
        arrived: the places of the parameters whose gradients wait to be reduced, one bit for each.
    """

    def __init__(self, unit: nn.Module, name: str, count_passes: Callable[[], int | None]) -> None:
        self.begins: Callable[[], None] = lambda: None
        self.arrived = 0
        self._unit = unit
        self._name = name
        # The unit's own parameters: those of inner units are DTensors at this time, and gathered later.
        self._parts = [
            (module, name, part)
            for module in own_modules(unit)
            for name, part in module._parameters.items()
            if part is not None
        ]
        self._hooked: dict[int, Tensor] = {}
        self._count_passes = count_passes
        self._arrived_in: dict[int, int] = {}  # the pass that brought the gradient of a place last
        self._memories: dict[int, tuple[Tensor, tuple[int, int], str]] = {}

    @outside_graphs
    def __call__(self, unit: nn.Module, inputs: Any) -> None:
        """Looks at the parameters that are gathered now; torch keeps the same tensors from step to step."""
        self.check_memory()
        for place, (module, name, part) in enumerate(self._parts):
            gathered = module._parameters[name]
            if gathered is None or gathered is part:
                continue
            label = f"{name!r} of a {type(module).__name__}"
            self._memories.setdefault(id(gathered), (gathered, _memory(gathered), label))
            mark_gathered(gathered, part)
            # The part may have been frozen or unfrozen since the first gather. torch reduces no empty gradient.
            trains = part.requires_grad and part.numel() > 0
            if gathered.requires_grad is not trains:
                gathered.requires_grad_(trains)
            # Held by its identity, and kept alive: a hook for each gather would call the user's hooks several times.
            if gathered.requires_grad and id(gathered) not in self._hooked:
                self._hooked[id(gathered)] = gathered
                gathered.register_hook(partial(self._arrive, gathered, part, 1 << place))

    def gathered(self) -> list[Any]:
        """Returns the parameters that the modules have now."""
        return [module._parameters[name] for module, name, _ in self._parts]

    def follow(self, order: UnitOrder) -> None:
        """Makes the unit be gathered and reduced in an order that all workers have agreed on."""

        number = order.add()

        def gather() -> None:
            unit = f"the unit {self._name!r}" if self._name else "the model"
            order.check((number,), lambda: f"gathering the parameters of {unit}")

        def reduce() -> None:
            arrived = self.arrived
            self.arrived = 0
            order.check((number, arrived), lambda: f"exchanging the gradients of {self._named(arrived)}")

        root = cast(FSDPModule, self._unit)
        root.set_custom_all_gather(AgreedGather(gather))
        root.set_custom_reduce_scatter(AgreedReduce(reduce))

    def _named(self, arrived: int) -> str:
        paths = {module: path for path, module in self._unit.named_modules(prefix=self._name)}
        used = [part for place, part in enumerate(self._parts) if arrived >> place & 1]
        names = [f"{paths[module]}.{name}".lstrip(".") for module, name, _ in used]
        rest = f" and {len(names) - _SHOWN} more ({arrived:x})" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + rest

    def _arrive(self, gathered: Tensor, part: Tensor, bit: int, gradient: Tensor) -> Tensor:
        number = self._count_passes()
        # torch adds a second gradient to the first in .grad. An empty .grad means that the first was reduced already.
        if number is not None and self._arrived_in.get(bit) == number and gathered.grad is None:
            raise ConfigError(
                f"The gradient of {self._named(bit)} came twice in one backward pass, and the first had been "
                "exchanged. A part of the model that runs more than once in a forward cannot be recomputed with "
                "use_reentrant=True in sharding stage 3: pass use_reentrant=False to checkpoint()."
            )
        if number is not None:
            self._arrived_in[bit] = number
        self.arrived |= bit
        self.begins()
        for hook in list((part._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        return gradient

    def has_local(self) -> bool:
        """Returns whether whole gradients wait at gathered parameters."""
        return any(gathered.grad is not None for gathered in self._hooked.values())

    def local_gradients(self, parts: Set[Tensor]) -> Iterator[Tensor]:
        """Yields the whole gradients that wait at the gathered copies of ``parts``."""
        for gathered in self._hooked.values():
            if gathered.grad is not None and part_of(cast(nn.Parameter, gathered)) in parts:
                yield gathered.grad

    def drop_local(self, parts: Set[Tensor]) -> None:
        """Drops the whole gradients that wait at the gathered copies of ``parts``; FSDP2 adds them up there."""
        for gathered in self._hooked.values():
            if part_of(cast(nn.Parameter, gathered)) in parts:
                gathered.grad = None
        for place, (_, _, part) in enumerate(self._parts):
            self.arrived &= ~((part in parts) << place)

    def check_memory(self) -> None:
        """Raises ConfigError when a gathered parameter was written or moved, which its part would not see."""
        for gathered, memory, label in self._memories.values():
            if _memory(gathered) != memory:
                raise ConfigError(
                    f"{label} was written or converted between a forward and step(), while sharding had it gathered: "
                    "the parts, which step() updates, would not see it. Do it after step(), or write into the "
                    "parameters that model.parameters() gives."
                )


def _memory(gathered: Tensor) -> tuple[int, int]:
    # A conversion moves the storage; a write in place raises the version.
    return gathered.untyped_storage()._cdata, gathered._version


def own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """Yields ``unit`` and the modules in it that belong to no inner unit."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from own_modules(child)


def _read_from_outside(error: RuntimeError) -> ConfigError:
    folder = f"{os.sep}torch{os.sep}"
    line = next(f for f in reversed(traceback.extract_tb(error.__traceback__)) if folder not in f.filename)
    return ConfigError(
        f"sharding stage 3: {line.filename}:{line.lineno} ({line.line}) reads a parameter of a module that is a "
        "unit of its own without calling the module, and finds this worker's part of it. Call the module; or name the "
        "units in sharding_configs['segment_anchors'] (with sharding_segment_strategy 'segment_anchors') and leave "
        "that module out; or set sharding_configs['stage'] to 1 or 2."
    )


def divide_model(
    module: nn.Module, units: Sequence[str], division: Division
) -> tuple[DividedModule, dict[nn.Parameter, nn.Parameter]]:
    """Divides ``module`` in place, starting from rank 0's parameters and buffers; see [Note: New parameters].

    Args:
        module: the user's module.
        units: qualified names of the modules in it that are gathered by themselves, inner ones first.
        division: how.

    Returns:
        The module to call, and the new parameter for each old one.
    """
    # Before the division: afterwards each worker holds a part, and unequal starts could not be seen.
    broadcast_from_rank_0([*module.parameters(), *module.buffers()], division.process_group)
    old = dict(module.named_parameters(remove_duplicate=False))
    on_cuda = division.mesh.device_type == "cuda"
    for parameter in old.values():
        parameter.data = parameter.data.contiguous()  # channels_last weights; convolutions follow their inputs
    keep_part_rules(division.mesh, division.divisor or division.mesh.size())
    policy = CPUOffloadPolicy() if division.offload and on_cuda else OffloadPolicy()
    named = dict(module.named_modules(remove_duplicate=False))
    # Inner units first: fully_shard() gives a module the parameters that no earlier call has taken.
    for target in [*(named[name] for name in units), module]:
        fully_shard(target, mesh=division.mesh, reshard_after_forward=not division.find_unused, offload_policy=policy)
    for part in (m for m in module.modules() if isinstance(m, FSDPModule)):
        kind = type(part)  # code decides by the names of classes, as transformers does whether labels are shifted
        kind.__name__ = kind.__mro__[2].__name__
        kind.__qualname__ = kind.__mro__[2].__qualname__
        if division.divisor is not None:
            part.set_gradient_divide_factor(division.divisor)
        # Not every backend multiplies within a reduction, so another divisor than the number of workers needs a sum.
        part.set_force_sum_reduction_for_comms(division.sum_first or division.divisor is not None)
    new = dict(module.named_parameters(remove_duplicate=False))
    replaced = {parameter: new[name] for name, parameter in old.items()}
    for parameter, new_parameter in replaced.items():
        new_parameter.__dict__.update(parameter.__dict__)  # its layout, and the user's attributes
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            # The dictionary itself: handle.remove() of the user's goes on working.
            setattr(new_parameter, hooks, getattr(parameter, hooks))
            setattr(parameter, hooks, None)
    return DividedModule(module, division), replaced


class ShardedOptimizer(OptimizerWrapper):
    """Steps the optimizer inside on this worker's parts.

    Until the model is divided it forwards everything, and :meth:`repoint` moves it to the new parameters.

    Args:
        optimizer: the optimizer inside.
        divided: the models, also those that come later.
        drops: whether ``zero_grad()`` drops what ``no_sync()`` left in the models; options may keep batches there.
    """

    def __init__(self, optimizer: Optimizer, divided: Sequence[DividedModule], *, drops: bool = True) -> None:
        super().__init__(optimizer)
        self._divided = divided
        self._drops = drops
        self._replaced: dict[nn.Parameter, nn.Parameter] = {}

    def repoint(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Puts the new parameters of ``replaced`` in the place of the old ones; state goes with them, by parts."""
        self._replaced.update(replaced)
        for group in self.param_groups:
            group["params"][:] = [self._replaced.get(p, p) for p in group["params"]]
        for old in [p for p in self.state if self._replaced.get(p, p) is not p]:
            new = self._replaced[old]
            entry = self.state.pop(old)
            self.state[new] = {
                key: part_like(value, new) if isinstance(value, Tensor) and value.shape == new.shape else value
                for key, value in entry.items()
            }

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates this worker's parts; returns the closure's loss."""
        # A forward without a backward may have left gathered copies, which this update would not reach.
        for divided in self._divided:
            divided.check_memory()
            divided.reshard()
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every parameter, those that ``no_sync()`` left in the models included."""
        super().zero_grad(set_to_none=set_to_none)
        if self._drops:
            for divided in self._divided:
                divided.drop_local(self.parameters())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: with DTensors, whole, or the part that this worker saved.

        Raises CheckpointError for the part of another worker.
        """
        if any(is_part(p) for p in self.parameters()):
            state_dict = optimizer_state_like(state_dict, self.parameters())
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group; parameters from before the model was divided are followed."""
        parameters = param_group["params"]
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        super().add_param_group({**param_group, "params": [self._replaced.get(p, p) for p in parameters]})

    def note_groups(self) -> None:
        """Follows parameters from before the model was divided, in groups that were added to the optimizer inside."""
        self.repoint({})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_divided": (), "_replaced": {}}


def keep_backward_of_views(unit: nn.Module) -> None:
    """Makes ``unit``, which ``fully_shard`` divided, be gathered in backward whatever becomes of its outputs."""
    # torch warns that a change in place would lose its hook; the hook below is not lost.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    unit.register_forward_hook(_hook_viewed)


@outside_graphs
def _hook_viewed(unit: Any, inputs: Any, output: Any) -> None:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            hook_viewed(leaf, unit._get_fsdp_state()._pre_backward)
