"""Stages 2 and 3: a module whose parameters and gradients ``fully_shard`` divides, and the optimizer of its parts.

[Note: New parameters]
``fully_shard`` puts new parameters (DTensors) in the place of the user's. An optimizer that was made before holds the
old ones, which nothing reads any longer: it would step without an error and move nothing. ``divide_model`` therefore
returns which parameter took the place of which, and sharding points the optimizers to them.

[Note: Hooks of parameters]
In backward the gradient arrives at the gathered parameter, a third tensor. A hook on a parameter (``register_hook``:
loss scaling, a user's own clipping) stands on the new one or, from before, on the old one, and torch would call
neither. The hooks of the old parameters move to the new ones, and every gathered parameter calls those of its part:
with the whole gradient of this worker, before the exchange, as in data parallel.

Between forward and backward ``named_parameters()`` of the divided module gives gathered parameters, whose ``.grad`` is
not the one that the optimizer uses. They carry a mark, by which the model that users hold always gives the parts.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fleet.errors import ConfigError
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._gradients.passes import outside_graphs
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.parts import is_part, mark_gathered, optimizer_state_like, part_like, part_of
from fleet.strategies._shared.through_host import gather_through_host


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a module is divided.

    Attributes:
        mesh: the workers that share one copy; with two dims the first holds copies of the second.
        process_group: all workers of the mesh.
        reshard_after_forward: release the gathered parameters after forward (stage 3).
        divisor: what the sum of the gradients over all workers is divided by; ``None`` is their number.
        sum_first: sum and divide afterwards, where the backend could average in the reduction.
        offload: keep parts, gradients and optimizer state in host memory.
        find_unused: a parameter without a gradient counts as one with gradient 0, as workers may differ in which.
    """

    mesh: DeviceMesh
    process_group: Any
    reshard_after_forward: bool
    divisor: float | None = None
    sum_first: bool = False
    offload: bool = False
    find_unused: bool = False


_PLAIN = (Tensor, str, bytes, int, float, complex, type(None), torch.dtype, torch.device)


def _check_output(output: Any) -> None:
    """Raises ConfigError when tensors may hide in ``output``: backward through them would be missed."""
    leaves = tree_leaves(output)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return
    hidden = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)]
    if hidden:
        raise ConfigError(
            f"sharding stages 2 and 3 find tensors in tuples, lists and dicts, and forward() returned {hidden[0]} "
            "without any beside it; its gradients would stay on each worker. Return the tensors themselves, make the "
            "class known with torch.utils._pytree.register_dataclass, or set sharding_configs['stage'] to 1."
        )


class DividedModule(nn.Module):
    """Runs a module that ``fully_shard`` divided; buffers are rank 0's before each training forward.

    Attributes:
        exchanges: whether the next backward pass exchanges gradients.
        held: True inside ``no_sync()``, and while ``require_backward_grad_sync`` is False.
    """

    def __init__(self, module: nn.Module, process_group: Any) -> None:
        super().__init__()
        self.module = module
        self.exchanges, self.held = True, False
        self._process_group = process_group
        self._roots = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self._gathered = [GatheredHooks(root) for root in self._roots]
        for root, hooks in zip(self._roots, self._gathered, strict=True):
            root.register_forward_pre_hook(hooks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        if torch.is_grad_enabled() and self.training:
            self._share_buffers()
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

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward may exchange gradients; assigning False is an open-ended ``no_sync()``."""
        return not self.held

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.held = not value
        self.set_exchanges(value)

    def set_exchanges(self, exchanges: bool) -> None:
        """Sets whether backward exchanges gradients, or adds them up on each worker for a later backward."""
        if exchanges != self.exchanges:
            self.exchanges = exchanges
            cast(FSDPModule, self.module).set_requires_gradient_sync(exchanges)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which backward leaves gradients local, to be exchanged by a later backward."""
        before = self.exchanges, self.held
        self.set_exchanges(False)
        self.held = True
        try:
            yield
        finally:
            self.set_exchanges(before[0])
            self.held = before[1]

    def drop_local(self, parameters: Iterable[Tensor]) -> None:
        """Drops the gradients of ``parameters`` that no backward pass has exchanged yet."""
        dropped = set(parameters)
        for hooks in self._gathered:
            hooks.drop_local(dropped)

    @outside_graphs
    def _share_buffers(self) -> None:
        buffers = [b for b in self.module.buffers() if b.numel()]
        if buffers:
            broadcast_from_rank_0(buffers, self._process_group)


class GatheredHooks:
    """Makes gathered parameters of a unit call the hooks of their parts; see [Note: Hooks of parameters]."""

    def __init__(self, unit: nn.Module) -> None:
        # The unit's own parameters: those of inner units are DTensors of their own at this time, and gathered later.
        self._parts = [
            (module, name, part)
            for module in own_modules(unit)
            for name, part in module._parameters.items()
            if part is not None
        ]
        self._hooked: dict[int, Tensor] = {}

    @outside_graphs
    def __call__(self, unit: nn.Module, inputs: Any) -> None:
        """Looks at the parameters that are gathered now; torch keeps the same tensors from step to step."""
        for module, name, part in self._parts:
            gathered = module._parameters[name]
            if gathered is None or gathered is part:
                continue
            mark_gathered(gathered, part)
            # It may have been frozen or unfrozen since it was gathered first. torch reduces no empty gradient.
            trains = part.requires_grad and part.numel() > 0
            if gathered.requires_grad is not trains:
                gathered.requires_grad_(trains)
            if gathered.requires_grad and id(gathered) not in self._hooked:
                self._hooked[id(gathered)] = gathered
                gathered.register_hook(lambda gradient, part=part: _run_hooks(part, gradient))

    def drop_local(self, parts: Set[Tensor]) -> None:
        """Drops the whole gradients that wait at what ``parts`` were gathered into; FSDP2 adds them up there."""
        for gathered in self._hooked.values():
            if part_of(cast(nn.Parameter, gathered)) in parts:
                gathered.grad = None


def own_modules(unit: nn.Module) -> Iterator[nn.Module]:
    """Yields ``unit`` and the modules in it that are in no unit of their own."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from own_modules(child)


def _run_hooks(part: Tensor, gradient: Tensor) -> Tensor:
    for hook in list((part._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _read_from_outside(error: RuntimeError) -> ConfigError:
    folder = f"{os.sep}torch{os.sep}"
    line = next(f for f in reversed(traceback.extract_tb(error.__traceback__)) if folder not in f.filename)
    return ConfigError(
        f"sharding stages 2 and 3: {line.filename}:{line.lineno} ({line.line}) reads a parameter of a module that is a "
        "unit of its own without calling the module, and finds this worker's part of it. Call the module; or name the "
        "units in sharding_configs['segment_anchors'] (with sharding_segment_strategy 'segment_anchors') and leave "
        "that module out; or set sharding_configs['stage'] to 1."
    )


def check_find_unused() -> None:
    """Raises ConfigError when this torch cannot divide models in which workers use different parameters."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ConfigError(
            f"find_unused_parameters with sharding stages 2 and 3 needs a newer torch than {torch.__version__}. Turn "
            "it off, or set sharding_configs['stage'] to 1."
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
    broadcast_from_rank_0([*module.parameters(), *module.buffers()], division.process_group)
    old = dict(module.named_parameters(remove_duplicate=False))
    on_cuda = division.mesh.device_type == "cuda"
    for parameter in old.values():
        parameter.data = parameter.data.contiguous()  # channels_last weights; convolutions follow their inputs
    if on_cuda:
        gather_through_host()
    policy = CPUOffloadPolicy() if division.offload and on_cuda else OffloadPolicy()
    named = dict(module.named_modules(remove_duplicate=False))
    for target in [*(named[name] for name in units), module]:
        fully_shard(
            target,
            mesh=division.mesh,
            reshard_after_forward=division.reshard_after_forward,
            offload_policy=policy,
        )
    for part in (m for m in module.modules() if isinstance(m, FSDPModule)):
        kind = type(part)  # code decides by the names of classes, as transformers does whether labels are shifted
        kind.__name__, kind.__qualname__ = kind.__mro__[2].__name__, kind.__mro__[2].__qualname__
        if division.divisor is not None:
            part.set_gradient_divide_factor(division.divisor)
        if division.find_unused:
            part.set_reduce_scatter_unused_params(True, recurse=False)
        # A divisor of one's own works on every backend only after a sum.
        part.set_force_sum_reduction_for_comms(division.sum_first or division.divisor is not None)
    new = dict(module.named_parameters(remove_duplicate=False))
    replaced = {parameter: new[name] for name, parameter in old.items()}
    for parameter, new_parameter in replaced.items():
        new_parameter.__dict__.update(parameter.__dict__)  # its layout, and what users put there
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            # The dictionary itself: handle.remove() of the user's goes on working.
            setattr(new_parameter, hooks, getattr(parameter, hooks))
            setattr(parameter, hooks, None)
    return DividedModule(module, division.process_group), replaced


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
