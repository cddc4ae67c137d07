"""The tensors of a module in a checkpoint: its parameters and buffers as items, and loading into them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fleet.checkpoint.boxes import HeldBox, held_boxes, holders_of, whole_shape
from fleet.checkpoint.index import tensor_names
from fleet.checkpoint.items import Item, StateSource, Wanted, misfits
from fleet.checkpoint.state_adapter import Description, StateAdapter
from fleet.checkpoint.values import decode, encode
from fleet.errors import CheckpointError, ConfigError
from fleet.job.axes import Axes
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.parameter_layout import layouts_of
from fleet.strategies._shared.parts import local


class ModelTensors(StateAdapter):
    """Describes and loads the state of one module.

    Args:
        key: its name in the checkpoint; without one, tensors have the names of the module.
        module: the user's module.
        axes: the place of this worker.
        wrapped: whether the job keeps the copies of its parameters equal.
        own: this worker's rank where every worker saves its state separately; ``None`` elsewhere.
        elsewhere: names of the state that other stages of a pipeline hold.
    """

    kind = "module"

    def __init__(
        self, key: str, module: nn.Module, axes: Axes, wrapped: bool = True, own: int | None = None,
        elsewhere: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.key = key
        self._axes = axes
        self._wrapped = wrapped
        self._own = own
        self.module: nn.Module = getattr(module, "_orig_mod", module)  # torch.compile adds this to every name
        self.elsewhere = frozenset(elsewhere)
        self._prefix = f"{key}/" if own is None else f"@{own}/{key}/"
        _check_has_numbers(key, self.module)

    def describe(self) -> Description:
        """Returns the state."""
        aliases = self._aliases()
        items = [item for item in self._tensors() if item.name not in aliases]
        values: dict[str, Any] = {}
        for name, value in self.module.state_dict().items():
            if not isinstance(value, Tensor):
                full = f"{self._prefix}{name}"
                found: dict[str, Tensor] = {}
                values[full] = encode(value, full, found)
                items += [self._item(inner, tensor) for inner, tensor in found.items()]
        return Description(items, aliases, values)

    def _aliases(self) -> dict[str, str]:
        """Returns the first name of each tied parameter by its further names."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        names = {name: f"{self._prefix}{name}" for name in self.module.state_dict() if name in parameters}
        firsts = {full: first.setdefault(id(parameters[name]), full) for name, full in names.items()}
        return {full: kept for full, kept in firsts.items() if full != kept}

    def _tensors(self) -> Iterator[Item]:
        if self._own is None:
            for item in module_items(self.module, self._axes, self._wrapped):
                yield replace(item, name=f"{self._prefix}{item.name}")
            return
        for name, value in self.module.state_dict().items():
            if isinstance(value, Tensor):
                yield self._item(f"{self._prefix}{name}", value)

    def _item(self, name: str, value: Tensor) -> Item:
        """Returns a tensor that no layout divides: inside a value, or in a state that every worker saves separately."""
        own = local(value).detach()
        holders = holders_of(self._axes, own, None, expert=False) if self._own is None else (self._own,)
        return Item(name, tuple(own.shape), [HeldBox((0,) * own.dim(), own)], holders, alone=self._own is None)

    def check(self, source: StateSource) -> list[str]:
        """Returns why the saved state does not fit the module; an empty list where it does. Nothing is changed."""
        state = self.describe()
        inside = {inner for value in state.values.values() for inner in tensor_names(value)}
        wanted = {item.name: item.shape for item in state.items if item.name not in inside}
        wanted |= {alias: wanted[name] for alias, name in state.aliases.items() if name in wanted}
        stored = _stored(source, state.aliases)
        found = misfits(wanted, {name: source.entry(stored.get(name, name)) for name in wanted})
        known = {*wanted, *state.values, *(f"{self._prefix}{name}" for name in self.elsewhere)}
        # A saved value may hold other tensors than the present one; they belong to it all the same.
        known |= {inner for name in state.values for inner in tensor_names(source.index.values.get(name))}
        names = (*source.index.tensors, *source.index.aliases)
        saved = [name for name in names if name.startswith(self._prefix) and name not in known]
        if saved:
            found.append(f"not of this model: {saved[:6]!r} ({len(saved)} in all)")
        return [f"{self.key!r}: {text}" for text in found]

    def twins(self, source: StateSource) -> list[tuple[str, str]]:
        """Returns the names of tied parameters that are two tensors in the saved state."""
        return [
            (alias, name)
            for alias, name in self._aliases().items()
            if (one := source.entry(alias)) is not None
            and (other := source.entry(name)) is not None
            and (one is not other and one.shape == other.shape)
        ]

    def wanted(self, source: StateSource) -> Wanted:
        """Returns the module's own memory, and memory for the tensors of its extra state."""
        found = Wanted()
        stored = _stored(source, self._aliases())
        layouts = layouts_of(self.module)
        for name, value in self.module.state_dict().items():
            full = f"{self._prefix}{name}"
            if not isinstance(value, Tensor):
                found.add_inside(source, source.index.values.get(full))
            elif self._own is not None:
                found.add(stored.get(full, full), [HeldBox((0,) * value.dim(), local(value).detach())])
            else:
                found.add(stored.get(full, full), held_boxes(value, layouts.get(name)))
        return found

    def put(self, source: StateSource, wanted: Wanted) -> None:
        """Loads the extra state into the module, and runs its hooks for loading; the tensors are already filled."""
        extra: dict[str, Any] = {}
        for name, value in self.module.state_dict().items():
            full = f"{self._prefix}{name}"
            if not isinstance(value, Tensor) and full in source.index.values:
                extra[name] = decode(source.index.values[full], wanted.tensor)
        self.module.load_state_dict(extra, strict=False)

    def parameter_names(self) -> dict[Tensor, str]:
        """Returns the name of each parameter in the module."""
        return {parameter: name for name, parameter in self.module.named_parameters()}


def module_items(module: nn.Module, axes: Axes, wrapped: bool = True) -> Iterator[Item]:
    """Yields the tensors in the state of ``module`` by its names, a tied parameter under each of them.

    Args:
        module: the user's module.
        axes: the place of this worker.
        wrapped: whether the job keeps the copies of its parameters equal.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    layouts = layouts_of(module)
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor):
            parameter = parameters.get(name)
            layout = layouts.get(name)
            holders = holders_of(axes, value, layout, expert=parameter is not None and is_expert(parameter))
            # Copies of buffers differ (the statistics of batch norm), so halves of two copies would make no whole.
            alone = parameter is None or not wrapped
            yield Item(name, whole_shape(value, layout), held_boxes(value, layout), holders, alone)


def _stored(source: StateSource, aliases: Mapping[str, str]) -> dict[str, str]:
    """Returns, for names missing in the checkpoint, another name there of the same tied parameter.

    Files of transformers have a tied weight under one name, without a note of the others.
    """
    names: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        names.setdefault(first, [first]).append(alias)
    found = {}
    for tied in names.values():
        known = next((name for name in tied if source.entry(name) is not None), None)
        if known is not None:
            found.update({name: known for name in tied if source.entry(name) is None})
    return found


def _check_has_numbers(key: str, module: nn.Module) -> None:
    """Raises ConfigError for a parameter or buffer without memory, which could neither be saved nor loaded."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if nn.parameter.is_lazy(value):
            raise ConfigError(
                f"checkpoint: {key!r}: {name!r} of a lazy module has no shape yet. Call its forward once before."
            )
        if value.is_meta:
            raise ConfigError(
                f"checkpoint: {key!r}: {name!r} is on the device 'meta', which has no memory for numbers. Call "
                'model.to_empty(device="cpu") before, and make the optimizer after it.'
            )


def refuse(problems: list[str], path: str) -> None:
    """Raises CheckpointError where there are ``problems``."""
    if problems:
        raise CheckpointError(
            f"load(path={path!r}) does not fit, and nothing was changed. {' '.join(f'{text}.' for text in problems)} "
            "It was saved from another model."
        )
