"""The tensors of a module in a checkpoint: taken from its parameters and buffers, and copied into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleet.checkpoint.boxes import HeldBox, held_boxes, holders_of, whole_shape
from fleet.checkpoint.items import Item, SavedTensors, misfits
from fleet.checkpoint.values import decode, encode, tensor_names
from fleet.errors import CheckpointError, ConfigError
from fleet.job.axes import Axes
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.parts import local
from fleet.strategies._shared.whole_states import layouts_of
from fleet.training.fleet_model import FleetModel


class ModelTensors:
    """Takes and loads the state of one module.

    Args:
        key: its name in the checkpoint.
        model: the user's module, or what ``distributed_model`` returned.
        axes: the place of this worker.
        wrapped: whether the job keeps the copies of its parameters equal.
        own: the rank, where each worker keeps a state of its own; ``None`` elsewhere.
    """

    kind = "module"

    def __init__(self, key: str, model: nn.Module, axes: Axes, wrapped: bool, own: int | None = None) -> None:
        self.key, self._axes, self._wrapped, self._own = key, axes, wrapped, own
        found = model.module if isinstance(model, FleetModel) else model
        self.module: nn.Module = getattr(found, "_orig_mod", found)  # torch.compile adds this to every name
        self._elsewhere = model._elsewhere if isinstance(model, FleetModel) else frozenset()
        self._prefix = key if own is None else f"@{own}/{key}"
        _check_has_numbers(key, self.module)

    def take(self) -> tuple[list[Item], dict[str, str], dict[str, Any]]:
        """Returns the tensors, the second names of tied parameters, and what is no tensor."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        layouts = layouts_of(self.module)
        aliases = self._aliases()
        items: list[Item] = []
        values: dict[str, Any] = {}
        for name, value in self.module.state_dict().items():
            full, parameter = f"{self._prefix}/{name}", parameters.get(name)
            if full in aliases:
                continue
            if not isinstance(value, Tensor):
                found: dict[str, Tensor] = {}
                values[full] = encode(value, full, found)
                items += [self._item(inner, tensor, None, None) for inner, tensor in found.items()]
            else:
                items.append(self._item(full, value, parameter, layouts.get(name)))
        return items, aliases, values

    def _aliases(self) -> dict[str, str]:
        """Returns, of each further name of a tied parameter, the first one."""
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        first: dict[int, str] = {}
        found = {}
        for name in self.module.state_dict():
            full, parameter = f"{self._prefix}/{name}", parameters.get(name)
            if parameter is not None and first.setdefault(id(parameter), full) != full:
                found[full] = first[id(parameter)]
        return found

    def _item(self, name: str, value: Tensor, parameter: Tensor | None, layout: Any) -> Item:
        if self._own is not None:
            own = local(value).detach()
            return Item(name, tuple(own.shape), [HeldBox((0,) * own.dim(), own)], (self._own,))
        expert = parameter is not None and is_expert(parameter)
        holders = holders_of(self._axes, value, layout, expert)
        alone = parameter is None or not self._wrapped
        return Item(name, whole_shape(value, layout), held_boxes(value, layout), holders, alone)

    def check(self, source: SavedTensors) -> list[str]:
        """Returns why the checkpoint does not fit the module; an empty list where it does. Nothing is changed."""
        items, aliases, values = self.take()
        inside = {inner for value in values.values() for inner in tensor_names(value)}
        wanted = {item.name: item.shape for item in items if item.name not in inside}
        wanted |= {alias: wanted[name] for alias, name in aliases.items() if name in wanted}
        stored = _stored(source, aliases)
        found = misfits(wanted, {name: source.entry(stored.get(name, name)) for name in wanted})
        for alias, name in aliases.items():
            one, other = source.entry(alias), source.entry(name)
            both = one is not None and other is not None and one is not other
            if both and not torch.equal(source.whole(alias), source.whole(name)):
                found.append(f"{name!r} and {alias!r} are one parameter here and differ in the checkpoint")
        begin = f"{self._prefix}/"
        known = {*wanted, *values, *(f"{begin}{name}" for name in self._elsewhere)}
        known |= {inner for name in values for inner in tensor_names(source.index.values.get(name))}
        saved = [n for n in (*source.index.tensors, *source.index.aliases) if n.startswith(begin) and n not in known]
        if saved:
            found.append(f"not of this model: {saved[:6]!r} ({len(saved)} in all)")
        return [f"{self.key!r}: {text}" for text in found]

    def verify(self, source: SavedTensors) -> None:
        """Reads and verifies what :meth:`load` needs, and changes nothing. Raises CheckpointError."""
        stored = _stored(source, self._aliases())
        for _, full, boxes in self._needed():
            if boxes is not None:
                source.verify(stored.get(full, full), boxes)
            else:
                source.verify_inside(full)

    def _needed(self) -> Iterator[tuple[str, str, list[HeldBox] | None]]:
        """Yields each entry of the state: its name, that in the checkpoint, and its boxes, ``None`` for no tensor."""
        layouts = layouts_of(self.module)
        for name, value in self.module.state_dict().items():
            boxes = None
            if isinstance(value, Tensor) and self._own is not None:
                boxes = [HeldBox((0,) * value.dim(), local(value))]
            elif isinstance(value, Tensor):
                boxes = held_boxes(value, layouts.get(name))
            yield name, f"{self._prefix}/{name}", boxes

    @torch.no_grad()
    def load(self, source: SavedTensors) -> None:
        """Copies the state into the module's own memory; :meth:`check` found nothing."""
        extra: dict[str, Any] = {}
        stored = _stored(source, self._aliases())
        for name, full, boxes in self._needed():
            if boxes is not None:
                source.fill(stored.get(full, full), boxes)
            elif full in source.index.values:
                extra[name] = decode(source.index.values[full], source.whole)
        self.module.load_state_dict(extra, strict=False)  # also for the hooks that a module has for loading

    def note_names_elsewhere(self, names: Iterable[str]) -> None:
        """Tells which names of the whole state other stages of a pipeline hold, before the job wraps the module."""
        self._elsewhere = frozenset(names) - set(self.module.state_dict())

    def parameter_names(self) -> dict[Tensor, str]:
        """Returns the name of each parameter in the module."""
        return {parameter: name for name, parameter in self.module.named_parameters()}


def _stored(source: SavedTensors, aliases: Mapping[str, str]) -> dict[str, str]:
    """Returns, of names that the checkpoint lacks, another name of the same tied parameter that it has.

    Files of transformers have a tied weight under one name, and nothing says that there was another.
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
