"""split: a plain model becomes the stages of a pipeline: its forward is followed once and cut between two layers.

See [Note: What can be followed].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, fx, nn

from fleet.errors import ConfigError
from fleet.strategies.pipeline.cut import plan_cut_by_size
from fleet.strategies.pipeline.descriptions import TIED, StagedLayers
from fleet.strategies.pipeline.followed import Followed, refusal

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
        followed = {mode: Followed(model, mode) for mode in (True, False)}
        nodes = followed[True].nodes
        if followed[True].calls != followed[False].calls:
            raise ConfigError(refusal(model, "it takes other calls in evaluation than in training"))
        layers = [node for node in nodes if node.op == "call_module"]
        self._layers_desc: list[Any] = [str(node.target) for node in layers]
        self.num_stages, self.stage, self.num_chunks = num_stages, stage, 1
        self._recompute_interval, self._offload = 0, False
        self.set_loss(loss_fn)
        self.segment_parts = self._plan(model, starts)
        self.shared_layers = nn.ModuleDict()
        cuts = [0, *(nodes.index(layers[at]) for at in self.segment_parts[1:-1]), len(nodes)]
        self._programs = {
            mode: Program(found.nodes, cuts[stage], cuts[stage + 1], found.constants)
            for mode, found in followed.items()
        }
        used = [
            _tensors_of(model, nodes[cuts[part] : cuts[part + 1]], followed[True].constants)
            for part in range(num_stages)
        ]
        for name, tensor in _named_tensors(model):
            if not any(name in found for found in used):
                used[0][name] = tensor  # forward does not use it, and it is a part of the state
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
        inside, saved = tuple(f"{name}." for name in layers), model.state_dict(keep_vars=True)
        for name, tensor in used[self.stage].items():
            if not name.startswith(inside):
                _put(self, name, tensor, is_saved=name in saved)


class Program:
    """The calls of forward from ``start`` up to ``end``; the first takes the inputs, later ones what came before.

    Args:
        nodes: the calls of the whole forward.
        start: the first call that is run here.
        end: the first that is not.
        constants: tensors that forward makes of nothing, by the name under which nodes ask for them.
    """

    def __init__(self, nodes: list[fx.Node], start: int, end: int, constants: dict[str, Tensor]) -> None:
        self._nodes, self._constants = nodes[start:end], constants
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
