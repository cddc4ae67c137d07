"""split: a plain model becomes the stages of a pipeline: its forward is followed once and cut between two layers.

[Note: What can be followed]
``torch.fx`` runs forward with stand-ins for tensors and records every call. Lists of blocks are looked into; each
block, and each module outside the lists, is a layer. At a cut everything that a later layer needs goes along: the
activation, and a mask or a size that was computed before. Forward must take the same path for all data; the inputs are
its parameters without a default. It is followed in training and in evaluation, which may differ in arguments only.
Side effects of forward would happen once, while it is followed, and never again: a random number that Python code
looks at, a counter, a buffer that is changed in place. Such models are refused.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fleet.errors import ConfigError
from fleet.strategies.pipeline.cut import plan_cut_by_size
from fleet.strategies.pipeline.descriptions import TIED, StagedLayers

_FACTORIES = ("arange", "zeros", "ones", "full", "empty", "tensor")
_CONSTANT = "_tensor_constant"  # the name under which torch.fx keeps a tensor in the model


class Followed:
    """The calls of ``model.forward`` in one mode.

    Args:
        model: the model, which is left as it was.
        training: the mode.

    Attributes:
        nodes: the calls.
        constants: the tensors that forward makes from numbers alone.

    Raises:
        ConfigError: forward cannot be followed.
    """

    def __init__(self, model: nn.Module, training: bool) -> None:
        before = _State(model)
        try:
            self.nodes = list(_followed(model, training).nodes)
            changed = before.difference(model)
        # torch.fx leaves them behind as attributes of the model.
        finally:
            self.constants: dict[str, Tensor] = {
                name: model.__dict__.pop(name) for name in list(model.__dict__) if name.startswith(_CONSTANT)
            }
            before.restore()
        if changed:
            raise ConfigError(refusal(model, f"{changed}, which would be done once and not in each step"))

    @property
    def calls(self) -> list[tuple[str, str]]:
        """The kind and the target of each call, in order."""
        return [(n.op, "" if n.target in self.constants else str(n.target)) for n in self.nodes]


class _State:
    """Attributes, buffers and random streams of a model, before its forward runs."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
        self._buffers = {
            (module, name): (buffer, buffer.detach().clone(), buffer._version)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        self._drawn = (torch.get_rng_state(), random.getstate())

    def difference(self, model: nn.Module) -> str:
        """Returns the first change in ``model``, in words; empty for none."""
        if not torch.equal(torch.get_rng_state(), self._drawn[0]) or random.getstate() != self._drawn[1]:
            return "it draws random numbers outside layers and functions of its input"
        for (module, name), (buffer, _, version) in self._buffers.items():
            if module._buffers.get(name) is not buffer or buffer._version != version:
                return f"it changes the buffer {name!r}"
        for place, module in model.named_modules():
            before = self._attributes[place]
            after = vars(module)
            for name in before.keys() | after.keys():
                if name.startswith(_CONSTANT) or before.get(name) is after.get(name):
                    continue
                return f"it changes the attribute {name!r} of {type(module).__name__}"
        return ""

    @torch.no_grad()
    def restore(self) -> None:
        """Gives buffers and random streams their values back."""
        for (module, name), (buffer, value, version) in self._buffers.items():
            if buffer._version != version:
                buffer.copy_(value)
            module._buffers[name] = buffer
        torch.set_rng_state(self._drawn[0])
        random.setstate(self._drawn[1])


class _Follower(fx.Tracer):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        lists = (nn.ModuleList, nn.Sequential)
        elements = {
            e for m in model.modules() if isinstance(m, lists) and m is not model for e in m.modules() if e is not m
        }
        # Blocks are the elements of lists, so modules around a list are looked into and its elements are not.
        self._looked_into = {
            m for m in model.modules() if m not in elements and any(isinstance(inner, lists) for inner in m.modules())
        }

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._looked_into


def _followed(model: nn.Module, training: bool) -> fx.Graph:
    """Returns the calls of ``model.forward``; raises ConfigError where it cannot be followed."""
    # Arguments with a default keep it, as plain values that torch.fx does not follow.
    modes = {module: module.training for module in model.modules()}
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = {p.name: p.default for p in parameters if p.default is not p.empty}
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ConfigError(refusal(model, "it takes *args or **kwargs"))
    model.train(training)
    try:
        with _factories_followed():
            graph: fx.Graph = _Follower(model).trace(model, concrete_args=fixed or None)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(refusal(model, f"{type(error).__name__}: {error}")) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not any(node.op == "call_module" for node in graph.nodes):
        raise ConfigError(refusal(model, "it calls no layer"))
    return graph


def refusal(model: nn.Module, reason: str) -> str:
    """Returns why ``model`` cannot be followed, the rule, and what to write."""
    first = reason.strip().splitlines()[0][:200]
    return (
        f"pipeline_configs['split'] cannot follow {type(model).__name__}.forward: {first}. It must call its layers one "
        "after the other, on the same path for all data (no assert, if or loop on values of tensors). Write the model "
        "as a fleet.meta_parallel.PipelineLayer."
    )


@contextmanager
def _factories_followed() -> Iterator[None]:
    """Records calls such as ``torch.arange(n)`` whose arguments are stand-ins; torch would ask them for numbers."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}

    def follow(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            stand_in = next((a for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)), None)
            if stand_in is None:
                return original(*args, **kwargs)
            return stand_in.tracer.create_proxy("call_function", original, args, kwargs)

        return call

    try:
        for name, original in originals.items():
            setattr(torch, name, follow(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


AUTO = ("auto",)


class SplitLayers(StagedLayers):
    """The part of a plain model that runs on one stage; parameters have the names of the model.

    Args:
        model: the model.
        starts: the names of the first layer of each stage but the first, or ``("auto",)``.
        num_stages: how many stages there are.
        stage: which of them this worker is.
        loss_fn: as for a list of layers.

    Raises:
        ConfigError: forward cannot be followed, or a name is not one of its layers.
    """

    def __init__(
        self, model: nn.Module, starts: Sequence[str], num_stages: int, stage: int, loss_fn: Any = None
    ) -> None:
        nn.Module.__init__(self)
        # Both modes, for dropout and the like take other arguments in evaluation.
        followed = {mode: Followed(model, mode) for mode in (True, False)}
        nodes = followed[True].nodes
        if followed[True].calls != followed[False].calls:
            raise ConfigError(refusal(model, "it takes other calls in evaluation than in training"))
        layers = [node for node in nodes if node.op == "call_module"]
        self._layers_desc: list[Any] = [str(node.target) for node in layers]
        self.num_stages = num_stages
        self.stage = stage
        self.num_chunks = 1
        self._recompute_interval = 0
        self._offload = False
        self.set_loss(loss_fn)
        self.segment_parts = self._plan(model, starts)
        self.shared_layers = nn.ModuleDict()
        cuts = [0, *(nodes.index(layers[at]) for at in self.segment_parts[1:-1]), len(nodes)]
        self._programs = {
            mode: Program(found.nodes, cuts[stage], cuts[stage + 1], found.constants)
            for mode, found in followed.items()
        }
        # Computed for all stages on each of them: ties and the place of unused tensors follow without a message.
        used = [
            _tensors_of(model, nodes[cuts[part] : cuts[part + 1]], followed[True].constants)
            for part in range(num_stages)
        ]
        for name, tensor in _named_tensors(model):
            if not any(name in found for found in used):
                used[0][name] = tensor  # forward does not use it, and the state of the model has it
        self._take(model, used)
        self.train(model.training)

    def forward(self, input: Any, chunk_id: int | None = None) -> Any:  # noqa: A002 - the name of Fleet
        """Returns the inputs of the next stage, or the output of the model."""
        return self._programs[self.training].run(self, input)

    @property
    def run_function(self) -> list[Callable[[Any], Any]]:
        """The forward of this stage."""
        return [self.forward]

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """Returns this stage, which has one chunk."""
        return [self]

    def holds(self, key: str) -> bool:
        """Returns whether this stage has the shared parameter ``key``."""
        return self.stage in self.ties.get(key, ())

    def tied_parameters(self, key: str) -> list[nn.Parameter]:
        """Returns the shared parameter that the model calls ``key``."""
        return [cast(nn.Parameter, self._tied[key])] if key in self._tied else []

    def tied_buffers(self, key: str) -> list[Tensor]:
        """Returns nothing: buffers of shared parameters' modules are not shared."""
        return []

    def _plan(self, model: nn.Module, starts: Sequence[str]) -> list[int]:
        names = self._layers_desc
        if tuple(starts) == AUTO:
            seen: set[nn.Parameter] = set()
            sizes = []
            for name in names:
                fresh = set(model.get_submodule(name).parameters()) - seen
                seen |= fresh
                sizes.append(sum(p.numel() for p in fresh))
            return plan_cut_by_size(sizes, self.num_stages)
        if len(starts) != self.num_stages - 1:
            raise ConfigError(
                f"pipeline_configs['split'] is {list(starts)!r}; for {self.num_stages} stages it names the first layer "
                f"of each stage but the first, {self.num_stages - 1} in all, or is 'auto'."
            )
        unknown = [name for name in starts if name not in names]
        if unknown:
            raise ConfigError(
                f"pipeline_configs['split'] names {unknown[0]!r}, which is no layer of the model. Layers, in the order "
                f"in which data passes them: {', '.join(names)}."
            )
        places = [names.index(name) for name in starts]
        if places != sorted(set(places)) or places[:1] == [0]:
            raise ConfigError(
                f"pipeline_configs['split'] is {list(starts)!r}; the names stand in the order in which data passes the "
                "layers, and each stage has a layer."
            )
        return [0, *places, len(names)]

    def _take(self, model: nn.Module, used: Sequence[dict[str, Tensor]]) -> None:
        """Keeps this stage's modules and tensors under the names of ``model``; ties parameters of several stages."""
        holders: dict[Tensor, dict[int, str]] = {}
        for stage, found in enumerate(used):
            for name, tensor in found.items():
                if isinstance(tensor, nn.Parameter):
                    holders.setdefault(tensor, {}).setdefault(stage, name)
        self.ties = {}
        self._tied = {}
        for parameter, names in holders.items():
            if len(names) > 1:
                # The first stage that holds it names it, so all stages find one key without a message.
                key = names[min(names)]
                self.ties[key] = tuple(sorted(names))
                if self.stage in names:
                    self._tied[key] = parameter
                    parameter.__dict__[TIED] = self.ties[key]
        # Layers come whole, with hooks and attributes. The rest (a parameter of the model itself) comes by name.
        layers = dict.fromkeys(self._layers_desc[slice(*self.segment_parts[self.stage : self.stage + 2])])
        for name in layers:
            _put(self, name, model.get_submodule(name))
        inside = tuple(f"{name}." for name in layers)
        saved = model.state_dict(keep_vars=True)
        for name, tensor in used[self.stage].items():
            if not name.startswith(inside):
                _put(self, name, tensor, is_saved=name in saved)


class Program:
    """The calls of forward from ``start`` up to ``end``; the first part takes the inputs of the model.

    Args:
        nodes: the calls of the whole forward.
        start: the first call that is run here.
        end: the first call of the next part.
        constants: tensors that forward makes from numbers alone, by the name under which nodes ask for them.
    """

    def __init__(self, nodes: list[fx.Node], start: int, end: int, constants: dict[str, Tensor]) -> None:
        self._nodes = nodes[start:end]
        self._constants = constants
        self._is_first = start == 0
        self._is_last = end == len(nodes)
        self._entering = _crossing(nodes, start)
        self._leaving = _crossing(nodes, end)
        # A value is dropped after its last use here; otherwise every activation would live until the stage ends.
        self._freed: dict[fx.Node, list[fx.Node]] = {}
        leaving = set(self._leaving)
        last = {node: user for user in self._nodes for node in user.all_input_nodes}
        for node, user in last.items():
            if node not in leaving:
                self._freed.setdefault(user, []).append(node)

    def run(self, root: nn.Module, value: Any) -> Any:
        """Returns the values for the next part, one alone or several in a tuple; or the output of the model."""
        entering = [node for node in self._nodes if node.op == "placeholder"] if self._is_first else self._entering
        required = [node for node in entering if not (node.op == "placeholder" and node.args)]
        given = [value] if len(required) == 1 else list(value)
        if len(given) != len(required):
            raise ConfigError(f"The model takes {len(required)} inputs, and the data has {len(given)}.")
        values: dict[fx.Node, Any] = dict(zip(required, given, strict=True))
        for node in self._nodes:
            if node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            if node.op == "placeholder":
                values.setdefault(node, node.args[0] if node.args else None)
            elif node.op == "get_attr" and node.target in self._constants:
                values[node] = self._constants[str(node.target)]
            else:
                values[node] = _called(root, node, values)
            for dead in self._freed.get(node, ()):
                values.pop(dead, None)
        left = tuple(values[node] for node in self._leaving)
        return left[0] if len(left) == 1 else left


def _called(root: nn.Module, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_module":
        return root.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "get_attr":
        return _attribute(root, str(node.target))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _crossing(nodes: list[fx.Node], at: int) -> list[fx.Node]:
    later = {node for user in nodes[at:] for node in user.all_input_nodes}
    return [node for node in nodes[:at] if node in later]


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _tensors_of(model: nn.Module, nodes: Sequence[fx.Node], constants: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters and buffers that ``nodes`` use, by name."""
    found: dict[str, Tensor] = {}
    for node in nodes:
        name = str(node.target)
        if node.op == "call_module":
            found |= {f"{name}.{inner}": tensor for inner, tensor in _named_tensors(model.get_submodule(name))}
        elif node.op == "get_attr" and name not in constants:
            found[name] = _attribute(model, name)
    return found


def _attribute(root: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(root.get_submodule(path), attribute)


def _put(root: nn.Module, name: str, value: nn.Module | Tensor, *, is_saved: bool = True) -> None:
    path, _, attribute = name.rpartition(".")
    holder = root
    for step in path.split(".") if path else ():
        if step not in holder._modules:
            holder.add_module(step, nn.Module())
        holder = holder.get_submodule(step)
    if isinstance(value, nn.Module):
        holder.add_module(attribute, value)
    elif isinstance(value, nn.Parameter):
        holder.register_parameter(attribute, value)
    else:
        holder.register_buffer(attribute, value, persistent=is_saved)
