"""The nested dictionaries of torch programs, such as ``{"model": ..., "optimizer": ..., "epoch": 3}``, and flat names.

[Note: The names of an optimizer's parameters]
torch numbers the parameters of an optimizer; a Fleet checkpoint has their names. They are those that the groups have as
``param_names``, if the optimizer was built from ``named_parameters()``. Numbers alone do not tell them: the user may
say that they follow the order of the model. Else a parameter is called ``#GROUP.PLACE``. What is written has
``param_names``, which torch's optimizers load and keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fleet.checkpoint.conversion.unfolded import most_of
from fleet.checkpoint.conversion.whole_state import DEFAULT_KEY, WholeState, check_key, describe, is_groups, key_of
from fleet.checkpoint.values import decode, encode
from fleet.errors import CheckpointError

_NAMES = "param_names"  # of an optimizer's groups


def state_of_tree(
    tree: Any, label: str, kind: str, key: str | None = None, in_order: bool = False,
    read: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> WholeState:  # fmt: skip
    """Returns the state that a torch program stored as ``tree``.

    Args:
        tree: a state dictionary, or a dictionary of those, of optimizers' and of plain values.
        label: how errors name the file.
        kind: the format, in words.
        key: the entry for a lone state dictionary; ``None`` for the usual one.
        in_order: the numbers of an optimizer without names follow the order of the model's parameters.
        read: returns the data of a tensor in ``tree``, which may hold placeholders without data.

    Raises:
        CheckpointError: it is no such dictionary, or ``in_order`` cannot be.
        ConfigError: it holds an object that is no plain data.
    """
    if not isinstance(tree, Mapping) or not tree or not all(isinstance(name, str) for name in tree):
        raise CheckpointError(
            f"{label} holds a {type(tree).__name__}, not a state: a dictionary of tensors by name, or of such "
            "dictionaries."
        )
    is_bare = any(isinstance(value, Tensor) for value in tree.values()) and not any(
        _is_optimizer(value) or _is_model(value) for value in tree.values()
    )
    entries = {key or DEFAULT_KEY: tree} if is_bare else dict(tree)
    flat = _Flat(label)
    for name, entry in entries.items():
        check_key(name, label)
        if _is_optimizer(entry):
            names = _parameter_names(entry, [one for one in entries.values() if _is_model(one)], in_order, label)
            flat.add_optimizer(name, entry, names)
        elif _is_model(entry):
            flat.add_model(name, entry)
        else:
            flat.kinds[name] = ["value", ""]
            flat.plain.append((name, entry))
    tensors = flat.finish()
    _check_stored(tensors, label)
    return WholeState(
        label, kind, {name: describe(tensor, f"{label}: {name!r}") for name, tensor in tensors.items()},
        lambda name: read(tensors[name]), flat.aliases, flat.values, is_bare, kinds=flat.kinds,
        notes=flat.notes,
    )  # fmt: skip


def tree_of_state(state: WholeState) -> dict[str, Any]:
    """Returns the nested dictionary of ``state``, with all tensors read; of a bare state, its one entry alone.

    Raises CheckpointError when an entry is two things at once.
    """

    @cache  # tied names must be one tensor in the tree, so that torch stores it once
    def tensor(name: str) -> Tensor:
        return state.read(name)

    inside = state.names_in_values()
    tree: dict[str, Any] = {}
    for key in state.keys():  # noqa: SIM118 - no mapping
        direct = {
            name.partition("/")[2]: tensor(state.aliases.get(name, name))
            for name in (*state.tensors, *state.aliases)
            if key_of(name) == key and name not in inside
        }
        direct |= {
            name.partition("/")[2]: decode(value, tensor)
            for name, value in state.values.items()
            if key_of(name) == key and name != key and not is_groups(name)
        }
        if key in state.values:
            if direct:
                raise CheckpointError(f"{state.label}: {key!r} is a value, and has tensors of its own as well.")
            tree[key] = decode(state.values[key], tensor)
        else:
            groups = state.groups(key)
            tree[key] = direct if groups is None else _optimizer_tree(direct, decode(groups, tensor), state.label)
    if state.is_bare and len(tree) == 1 and isinstance(next(iter(tree.values())), dict):
        (only,) = tree.values()
        return dict(only)
    return tree


def _check_stored(tensors: Mapping[str, Tensor], label: str) -> None:
    """Raises CheckpointError where few stored numbers stand for far larger tensors, as a stride of 0 makes them."""
    stored = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors.values()}
    held = sum(stored.values())
    needed = sum(one.nbytes for one in tensors.values())
    if needed > most_of(held):
        largest = max(tensors, key=lambda name: tensors[name].nbytes)
        raise CheckpointError(
            f"{label} has {held} bytes of numbers, and its tensors would have {needed}: {largest!r} is "
            f"{list(tensors[largest].shape)}, in which the same numbers stand again and again. At most {most_of(held)} "
            "are read. Save expanded tensors as what they were expanded from."
        )


class _Flat:
    """The flat names of a nested dictionary; plain values come last, so that their tensors take names that are free."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[Any, str] = {}
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.kinds: dict[str, list[str]] = {}
        self.plain: list[tuple[str, Any]] = []
        self._groups: dict[str, list[tuple[list[str], Mapping[str, Any]]]] = {}
        self.notes: list[str] = []

    def add_model(self, key: str, entry: Mapping[str, Any]) -> None:
        self.kinds[key] = ["module", ""]
        for name, value in entry.items():
            self._put(key, name, value)

    def add_optimizer(self, key: str, entry: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.kinds[key] = ["optimizer", ""]
        self._groups[f"{key}/groups@0"] = [
            ([names[f"{one}"] for one in group["params"]], group) for group in entry["param_groups"]
        ]
        unnamed = [name for name in names.values() if name.startswith("#")]
        if unnamed:
            self.notes.append(
                f"{key}: the file does not say which parameters its {len(unnamed)} numbers stand for; they are called "
                f"{unnamed[0]} and so on. If they follow the order of the model, add --in-order"
            )
        for number, states in entry.get("state", {}).items():
            if f"{number}" not in names or not isinstance(states, Mapping):
                raise CheckpointError(
                    f"{self._label}: {key!r} has a state of parameter {number!r}, which no group has."
                )
            for name, value in states.items():
                if not isinstance(name, str) or "/" in name:
                    raise CheckpointError(f"{self._label}: {key!r} has a state called {name!r}; '/' divides names.")
                self._put(key, f"{names[f'{number}']}/{name}", value, can_be_tied=False)
        for name, value in entry.items():
            if name not in ("state", "param_groups"):
                self.plain.append((f"{key}/+{name}", value))

    def _put(self, key: str, name: str, value: Any, can_be_tied: bool = True) -> None:
        full = f"{key}/{name}"
        if not isinstance(value, Tensor):
            self.plain.append((full, value))
            return
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(
                f"{self._label}: {full!r} is no dense tensor of numbers ({value.layout}, {value.dtype})."
            )
        place = (
            key, value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype,
        )  # fmt: skip
        if can_be_tied and value.numel() and self._places.setdefault(place, full) != full:
            self.aliases[full] = self._places[place]
        else:
            self._tensors[full] = value

    def finish(self) -> dict[str, Tensor]:
        for name, value in self.plain:
            self.values[name] = encode(value, name, self._tensors)
        for name, groups in self._groups.items():
            self.values[name] = []
            for number, (names, group) in enumerate(groups):
                settings = {one: value for one, value in group.items() if one not in ("params", _NAMES)}
                encoded = encode(settings, f"{name.partition('@')[0]}/{number}", self._tensors)
                self.values[name].append({"params": names, "settings": encoded})
        return self._tensors


def _is_optimizer(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and isinstance(entry.get("param_groups"), list)
        and isinstance(entry.get("state", {}), Mapping)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in entry["param_groups"])
        and bool(entry["param_groups"])
    )


def _is_model(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and all(isinstance(name, str) for name in entry)
        and any(isinstance(value, Tensor) for value in entry.values())
    )


def _parameter_names(
    optimizer: Mapping[str, Any], models: Sequence[Mapping[str, Any]], in_order: bool, label: str
) -> dict[str, str]:
    """Returns the names of an optimizer's parameters by their numbers, as texts, in its state."""
    groups = optimizer["param_groups"]
    numbers = [f"{number}" for group in groups for number in group["params"]]
    if not all(number.isdecimal() for number in numbers):
        return {number: number for number in numbers}  # names already, as torch's get_state_dict writes them
    named = [name for group in groups for name in group.get(_NAMES, [])]
    if len(named) == len(set(named)) == len(numbers) and all(isinstance(name, str) for name in named):
        return dict(zip(numbers, named, strict=True))
    if not in_order:
        return {f"{number}": f"#{g}.{p}" for g, group in enumerate(groups) for p, number in enumerate(group["params"])}
    proposals = [_in_order(numbers, optimizer.get("state", {}), model) for model in models]
    found = [proposal for proposal in proposals if proposal]
    if len(groups) != 1 or not found or any(proposal != found[0] for proposal in found):
        raise CheckpointError(
            f"--in-order: {label}: the optimizer has {len(numbers)} parameters in {len(groups)} groups, and "
            f"{len(found)} of {len(models)} models have as many of the shapes of their states; one group and one model "
            "are needed. Leave out --in-order, or build the optimizer from named_parameters() and save again."
        )
    return found[0]


def _in_order(numbers: Sequence[str], states: Mapping[Any, Any], model: Mapping[str, Any]) -> dict[str, str]:
    """Returns the parameters of ``model`` in its order if they are as many, with the shapes of their states."""
    parameters: dict[Any, tuple[str, Tensor]] = {}
    for name, value in model.items():
        is_statistic = name.endswith((".running_mean", ".running_var")) and (
            f"{name.rpartition('.')[0]}.num_batches_tracked" in model
        )
        if isinstance(value, Tensor) and value.is_floating_point() and not is_statistic:
            parameters.setdefault((value.untyped_storage()._cdata, value.storage_offset()), (name, value))
    by_number = {f"{number}": one for number, one in states.items()}
    found = {}
    for number, (name, parameter) in zip(numbers, parameters.values(), strict=False):
        shapes = [one.shape for one in by_number.get(number, {}).values() if isinstance(one, Tensor) and one.dim()]
        if shapes and parameter.shape not in shapes:
            return {}
        found[number] = name
    return found if len(parameters) == len(numbers) else {}


def _optimizer_tree(direct: dict[str, Any], groups: Sequence[Mapping[str, Any]], label: str) -> dict[str, Any]:
    """Returns the state as torch's optimizers load it, with parameters by their number over all groups."""
    numbers = {name: place for place, name in enumerate(name for group in groups for name in group["params"])}
    states: dict[int, dict[str, Any]] = {}
    extra: dict[str, Any] = {}
    for full, value in direct.items():
        name, _, last = full.rpartition("/")
        if full.startswith("+"):
            extra[full[1:]] = value
        elif name not in numbers:
            raise CheckpointError(f"{label}: the optimizer has a state of {name!r}, which none of its groups has.")
        else:
            states.setdefault(numbers[name], {})[last] = value
    has_names = not any(name.startswith("#") for name in numbers)
    renumbered = [
        {
            **({_NAMES: [*group["params"]]} if has_names else {}),
            **group["settings"],
            "params": [numbers[name] for name in group["params"]],
        }
        for group in groups
    ]
    return {"state": {number: states[number] for number in sorted(states)}, "param_groups": renumbered, **extra}
