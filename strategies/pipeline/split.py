"""split: a plain model becomes the stages of a pipeline: its forward is followed once and cut between two layers.

[Note: What can be followed]
``torch.fx`` runs forward with stand-ins for tensors and records every call. Lists of blocks are looked into; each
block, and each module outside the lists, is a layer. At a cut everything that a later layer needs goes along: the
activation, and a mask or a size that was computed before. Forward must take the same path for all data; the inputs are
its parameters without a default. It is followed in training and in evaluation, which may differ in arguments only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fleet.errors import ConfigError
from fleet.strategies.pipeline.cut import plan_cut_by_size
from fleet.strategies.pipeline.descriptions import TIED, StagedLayers

AUTO = ("auto",)
_FACTORIES = ("arange", "zeros", "ones", "full", "empty", "tensor")


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
        graphs = {mode: _followed(model, mode) for mode in (True, False)}
        nodes = list(graphs[True].nodes)
        if [(n.op, str(n.target)) for n in nodes] != [(n.op, str(n.target)) for n in graphs[False].nodes]:
            raise ConfigError(_refusal(model, "it takes other calls in evaluation than in training"))
        layers = [node for node in nodes if node.op == "call_module"]
        self._layers_desc: list[Any] = [str(node.target) for node in layers]
        self.num_stages, self.stage, self.num_chunks = num_stages, stage, 1
        self._recompute_interval, self._offload = 0, False
        self.set_loss(loss_fn)
        self.segment_parts = self._plan(model, starts)
        self.shared_layers = nn.ModuleDict()
        cuts = [0, *(nodes.index(layers[at]) for at in self.segment_parts[1:-1]), len(nodes)]
        self._programs = {
            mode: Program(list(graph.nodes), cuts[stage], cuts[stage + 1]) for mode, graph in graphs.items()
        }
        used = [_tensors_of(model, nodes[cuts[part] : cuts[part + 1]]) for part in range(num_stages)]
        self._take(model, used)
        self.train(model.training)

    def forward(self, input: Any, chunk_id: int | None = None) -> Any:  # noqa: A002 - the name of Fleet
        """Returns what the next stage needs, or the output of the model."""
        return self._programs[self.training].run(self, input)

    @property
    def run_function(self) -> list[Callable[[Any], Any]]:
        """What this stage runs."""
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
        """Keeps what this stage uses, under the names of ``model``; parameters of several stages are tied."""
        holders: dict[Tensor, dict[int, str]] = {}
        for stage, found in enumerate(used):
            for name, tensor in found.items():
                if isinstance(tensor, nn.Parameter):
                    holders.setdefault(tensor, {}).setdefault(stage, name)
        self.ties, self._tied = {}, {}
        for parameter, names in holders.items():
            if len(names) > 1:
                key = names[min(names)]
                self.ties[key] = tuple(sorted(names))
                if self.stage in names:
                    self._tied[key] = parameter
                    parameter.__dict__[TIED] = self.ties[key]
        layers = dict.fromkeys(self._layers_desc[slice(*self.segment_parts[self.stage : self.stage + 2])])
        for name in layers:
            _put(self, name, model.get_submodule(name))
        inside = tuple(f"{name}." for name in layers)
        for name, tensor in used[self.stage].items():
            if not name.startswith(inside):
                _put(self, name, tensor)


class Program:
    """The calls of forward from ``start`` up to ``end``; the first takes the inputs, later ones what came before.

    Args:
        nodes: the calls of the whole forward.
        start: the first call that is run here.
        end: the first that is not.
    """

    def __init__(self, nodes: list[fx.Node], start: int, end: int) -> None:
        self._nodes = nodes[start:end]
        self._is_first, self._is_last = start == 0, end == len(nodes)
        self._entering, self._leaving = _crossing(nodes, start), _crossing(nodes, end)
        self._freed: dict[fx.Node, list[fx.Node]] = {}
        leaving = set(self._leaving)
        last = {node: user for user in self._nodes for node in user.all_input_nodes}
        for node, user in last.items():
            if node not in leaving:
                self._freed.setdefault(user, []).append(node)

    def run(self, root: nn.Module, value: Any) -> Any:
        """Returns what leaves: one value alone, several in a tuple; or the output of the model."""
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


def _tensors_of(model: nn.Module, nodes: Sequence[fx.Node]) -> dict[str, Tensor]:
    """Returns the parameters and buffers that ``nodes`` use, by name."""
    found: dict[str, Tensor] = {}
    for node in nodes:
        name = str(node.target)
        if node.op == "call_module":
            module = model.get_submodule(name)
            for tensors in (module.named_parameters, module.named_buffers):
                found |= {f"{name}.{inner}": tensor for inner, tensor in tensors(remove_duplicate=False)}
        elif node.op == "get_attr":
            found[name] = _attribute(model, name)
    return found


def _attribute(root: nn.Module, name: str) -> Any:
    path, _, attribute = name.rpartition(".")
    return getattr(root.get_submodule(path), attribute)


def _put(root: nn.Module, name: str, value: nn.Module | Tensor) -> None:
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
        holder.register_buffer(attribute, value)


class _Follower(fx.Tracer):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        lists = (nn.ModuleList, nn.Sequential)
        elements = {
            e for m in model.modules() if isinstance(m, lists) and m is not model for e in m.modules() if e is not m
        }
        self._looked_into = {
            m for m in model.modules() if m not in elements and any(isinstance(inner, lists) for inner in m.modules())
        }

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._looked_into


def _followed(model: nn.Module, training: bool) -> fx.Graph:
    """Returns the calls of ``model.forward``; raises ConfigError where it cannot be followed."""
    modes = {module: module.training for module in model.modules()}
    parameters = inspect.signature(model.forward).parameters.values()
    fixed = {p.name: p.default for p in parameters if p.default is not p.empty}
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ConfigError(_refusal(model, "it takes *args or **kwargs"))
    model.train(training)
    try:
        with _factories_followed():
            graph: fx.Graph = _Follower(model).trace(model, concrete_args=fixed or None)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_refusal(model, f"{type(error).__name__}: {error}")) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    if not any(node.op == "call_module" for node in graph.nodes):
        raise ConfigError(_refusal(model, "it calls no layer"))
    return graph


def _refusal(model: nn.Module, reason: str) -> str:
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
