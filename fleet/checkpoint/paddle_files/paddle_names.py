"""Which array of a Paddle file belongs to which entry of a torch model, and how it lies.

[Note: What differs]
Names of batch norms' running values differ (``_mean``, ``_variance``), and a linear weight is [in, out] in Paddle and
[out, in] in torch. Whether a weight is transposed follows from the type of its module, never from its shape: square
weights would not show it. Embeddings, convolutions, norms and recurrent cells lie the same in both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleet.checkpoint.paddle_files.paddle_pickle import PaddleState
from fleet.common.plain_files import read_small, replace_file
from fleet.errors import CheckpointError
from fleet.strategies.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

_MOST_BYTES = 1 << 26  # of a file with a name map
_RENAMED = {"running_mean": "_mean", "running_var": "_variance"}
_BACK = {theirs: ours for ours, theirs in _RENAMED.items()}
# What Paddle's own names say: "batch_norm2d_0.w_2" is the variance of a batch norm.
_OWN_NAME = re.compile(r"(?:.*/)?([a-zA-Z_0-9]*?)_[0-9]+\.([wb])_([0-9]+)")
_LINEAR = {"linear", "fc", "column_parallel_linear", "row_parallel_linear"}
_LINEAR |= {"column_sequence_parallel_linear", "row_sequence_parallel_linear"}
_EMBEDDING = {"embedding", "vocab_parallel_embedding"}
_SHOWN = 5


class NameMap(dict[str, str]):
    """Names of a torch model's entries to names in a Paddle file.

    Attributes:
        unsure: entries that other arrays fit as well, with all that fit; the map has them by their order. It is empty
            where names, shapes and kinds of layers leave one possibility.

    Example:
        >>> twins = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
        >>> arrays = {"linear_0.w_0": torch.ones(4, 4), "linear_1.w_0": torch.ones(4, 4)}
        >>> proposed = fleet.checkpoint.propose_map(twins, arrays)
        >>> proposed.unsure["0.weight"]
        ['linear_0.w_0', 'linear_1.w_0']
        >>> proposed.write("names.json")  # to be read and corrected by you, then given as name_map="names.json"
    """

    def __init__(self, names: Mapping[str, str], unsure: Mapping[str, list[str]] | None = None) -> None:
        super().__init__(names)
        self.unsure: dict[str, list[str]] = dict(unsure or {})

    def write(self, path: str | Path) -> None:
        """Writes the map as a JSON object."""
        replace_file(path, json.dumps(self, indent=2) + "\n")


def read_name_map(given: Mapping[str, str] | str | Path) -> dict[str, str]:
    """Returns a name map that the user gave as a dictionary or as the path of a JSON file.

    Raises CheckpointError unless it is an object of texts.
    """
    if isinstance(given, Mapping):
        found: Any = dict(given)
    else:
        try:
            found = json.loads(read_small(given, _MOST_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"name_map={str(given)!r}: {error}.") from None
    if not isinstance(found, dict) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise CheckpointError(
            f"name_map={given!r:.200}: it must be an object from the model's names to Paddle's, such as "
            '{"fc.weight": "linear_0.w_0"}.'
        )
    return found


@dataclass(frozen=True)
class ModelEntry:
    """One tensor of a torch model's state.

    Attributes:
        name: its name in ``model.state_dict()``.
        role: ``"weight"``, ``"bias"``, ``"mean"``, ``"variance"``, or its own last name.
        kind: what Paddle calls its layer, or ``""``.
        is_transposed: whether Paddle has it as [in, out].
        shape: its shape in Paddle.
    """

    name: str
    role: str
    kind: str
    is_transposed: bool
    shape: tuple[int, ...]


def entries_of(model: nn.Module) -> dict[str, ModelEntry]:
    """Returns the tensors of ``model.state_dict()`` that a Paddle file has, by name."""
    modules = dict(model.named_modules(remove_duplicate=False))
    entries = {}
    for name, value in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if not isinstance(value, Tensor) or last == "num_batches_tracked":
            continue
        owner = modules.get(prefix)
        kind = _kind_of(owner)
        is_transposed = kind == "linear" and last == "weight"
        shape = tuple(reversed(value.shape)) if is_transposed else tuple(value.shape)
        role = {"running_mean": "mean", "running_var": "variance"}.get(last, last)
        entries[name] = ModelEntry(name, role, kind, is_transposed, shape)
    for tied in _tied_with_embeddings(model, entries):  # torch's head is Paddle's matmul with the embedding
        embedding = next(entries[name] for name in tied if entries[name].kind == "embedding")
        entries.update({name: replace(embedding, name=name) for name in tied})
    return entries


def _tied_with_embeddings(model: nn.Module, entries: Mapping[str, ModelEntry]) -> list[list[str]]:
    """Returns the names of each parameter that is the weight of an embedding and of a linear layer."""
    groups: dict[str, list[str]] = {}
    for name, first in _ties(model, entries).items():
        groups.setdefault(first, []).append(name)
    wanted = {"embedding", "linear"}
    return [names for names in groups.values() if wanted <= {entries[name].kind for name in names}]


def check_ties(model: nn.Module, names: Mapping[str, str], arrays: Mapping[str, Any], label: str) -> None:
    """Raises CheckpointError where one parameter of the model would have to take two different arrays."""
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = {name: _kind_of(modules.get(name.rpartition(".")[0])) for name in names}
    for name, first in _ties(model, names).items():
        if names[name] == names[first]:
            continue
        if not torch.equal(arrays[names[name]], arrays[names[first]]):
            raise CheckpointError(
                f"{first!r} and {name!r} are one parameter of the model; {label} has {names[first]!r} and "
                f"{names[name]!r}, which differ. Load into a model without that tie."
            )
        if {kinds[name], kinds[first]} == {"embedding", "linear"}:
            raise CheckpointError(
                f"{first!r} and {name!r} are one parameter of the model, and {label} has both. A linear layer of "
                "Paddle does not transpose its weight: it computes something else. Load into a model without that tie."
            )


def _kind_of(module: nn.Module | None) -> str:
    if isinstance(module, nn.Linear | ColumnParallelLinear | RowParallelLinear):
        return "linear"
    kinds: tuple[tuple[str, Any], ...] = (
        ("embedding", nn.Embedding | VocabParallelEmbedding),
        ("layer_norm", nn.LayerNorm),
        ("group_norm", nn.GroupNorm),
        ("batch_norm", nn.modules.batchnorm._BatchNorm),
        ("conv", nn.modules.conv._ConvNd),
    )
    return next((kind for kind, types in kinds if isinstance(module, types)), "")


def paddle_kind(own_name: str) -> str:
    """Returns what kind of layer Paddle's own name of a parameter tells, or ``""``."""
    match = _OWN_NAME.fullmatch(own_name)
    if match is None:
        return ""
    layer = match[1]
    if layer in _LINEAR:
        return "linear"
    if layer in _EMBEDDING:
        return "embedding"
    if layer in ("layer_norm", "group_norm"):
        return layer
    if re.fullmatch(r"(sync_)?batch_norm([123]d)?", layer):
        return "batch_norm"
    return "conv" if re.fullmatch(r"conv[123]d(_transpose)?", layer) else "other"


def _paddle_role(name: str, own_name: str) -> str:
    last = name.rpartition(".")[2]
    if last in ("weight", "bias"):
        return last
    if last in _BACK:
        return "mean" if last == "_mean" else "variance"
    match = _OWN_NAME.fullmatch(own_name)
    if match is None:
        return last
    place = int(match[3])
    if match[2] == "b":
        return "bias"
    running = {1: "mean", 2: "variance"} if "batch_norm" in match[1] else {}
    return running.get(place, "weight")


def torch_name(name: str, renamed: Mapping[str, str] = _BACK) -> str:
    """Returns torch's name of what Paddle's dynamic layers call ``name``; with other ``renamed``, the reverse."""
    prefix, dot, last = name.rpartition(".")
    return f"{prefix}{dot}{renamed.get(last, last)}"


def propose_map(model: nn.Module, arrays: PaddleState | Mapping[str, Tensor]) -> NameMap:
    """Returns which array of a Paddle file each entry of ``model.state_dict()`` takes.

    Equal names decide where the file has all of them; of a parameter with several names there, one is enough.
    Otherwise roles (weight, bias, running values), shapes and kinds of layers do; entries that more than one array fits
    are filled by the order of both, and named in :attr:`NameMap.unsure`: look at them before you use the map.

    Args:
        model: the torch model, not divided over workers.
        arrays: what :func:`read_paddle` returned.

    Raises:
        CheckpointError: an entry that no array fits, an array that no entry takes, or other shapes under equal names.

    Example:
        >>> arrays = {"linear_0.w_0": torch.ones(4, 2), "linear_0.b_0": torch.ones(2)}
        >>> fleet.checkpoint.propose_map(torch.nn.Linear(4, 2), arrays)
        {'weight': 'linear_0.w_0', 'bias': 'linear_0.b_0'}
    """
    entries = entries_of(model)
    own = arrays.parameter_names if isinstance(arrays, PaddleState) else {}
    shapes = {name: tuple(value.shape) for name, value in arrays.items() if isinstance(value, Tensor)}
    by_name = {name: torch_name(name, _RENAMED) for name in entries}
    firsts = _first_names(arrays, own)
    if entries and all(theirs in shapes for theirs in by_name.values()):
        check_shapes(entries, by_name, shapes)
        used = {firsts[theirs] for theirs in by_name.values()}
        check_all_used({name: shape for name, shape in shapes.items() if firsts[name] == name}, used)
        return NameMap(by_name)
    # A parameter under several names in the file is one candidate, and tied entries of the model take one array.
    shapes = {name: shape for name, shape in shapes.items() if firsts[name] == name}
    ties = _ties(model, entries)
    first = [entry for name, entry in entries.items() if ties[name] == name]
    kinds = {name: (_paddle_role(name, own.get(name, name)), paddle_kind(own.get(name, name))) for name in shapes}
    fitting = {
        entry.name: [
            name
            for name, shape in shapes.items()
            if shape == entry.shape and kinds[name][0] == entry.role and _agree(kinds[name][1], entry.kind)
        ]
        for entry in first
    }
    chosen, unsure = _settled(entries, fitting)
    check_all_used(shapes, set(chosen.values()))
    return NameMap({name: chosen[ties[name]] for name in entries}, unsure)


def _first_names(arrays: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, str]:
    """Returns the first name of each array: Paddle lists a parameter under every path to it, as in its LSTM."""
    seen: dict[str, str] = {}
    firsts = {}
    for name, value in arrays.items():
        if isinstance(value, Tensor):
            first = seen.setdefault(own.get(name, name), name)
            firsts[name] = first if first == name or torch.equal(arrays[first], value) else name
    return firsts


def _agree(theirs: str, ours: str) -> bool:
    return theirs == ours or not theirs or not ours


def _ties(model: nn.Module, entries: Iterable[str]) -> dict[str, str]:
    """Returns the first name of each entry's tensor: tied weights have several."""
    state = model.state_dict(keep_vars=True)
    seen: dict[int, str] = {}
    return {name: seen.setdefault(id(state[name]), name) for name in entries}


def _settled(
    entries: Mapping[str, ModelEntry], fitting: Mapping[str, list[str]]
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Gives each entry an array: those with one possibility first, then the others by order."""
    # An array that only one entry can take is lost to the others, which may leave one possibility to these as well.
    left = {name: list(names) for name, names in fitting.items()}
    chosen: dict[str, str] = {}
    while single := next((name for name, names in left.items() if len(names) == 1), None):
        (chosen[single],) = left.pop(single)
        for names in left.values():
            if chosen[single] in names:
                names.remove(chosen[single])
    unsure = {name: list(names) for name, names in left.items()}
    for name, names in left.items():
        free = [candidate for candidate in names if candidate not in chosen.values()]
        if not free:
            entry = entries[name]
            fit = f"; {', '.join(fitting[name])} would, and other entries take it" if fitting[name] else ""
            raise CheckpointError(
                f"No array of the file fits {name!r} of the model: a {entry.role} that Paddle would have as "
                f"{list(entry.shape)}{fit}. Give the model that was saved, or a name_map."
            )
        chosen[name] = free[0]
    return chosen, unsure


def check_shapes(
    entries: Mapping[str, ModelEntry], names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises CheckpointError unless each entry's array has its shape, transposed where torch's lies otherwise."""
    for name, entry in entries.items():
        found = shapes[names[name]]
        if found != entry.shape:
            turned = ", which is [out, in] there and [in, out] in Paddle" if entry.is_transposed else ""
            wanted = tuple(reversed(entry.shape)) if entry.is_transposed else entry.shape
            raise CheckpointError(
                f"{names[name]!r} of the file is {list(found)}; {name!r} of the model is {list(wanted)}{turned}. Give "
                "the model that was saved, or another name_map."
            )


def check_all_used(shapes: Mapping[str, tuple[int, ...]], used: Collection[str]) -> None:
    """Raises CheckpointError where the file has arrays that the model does not use."""
    if left := [f"{name} {list(shape)}" for name, shape in shapes.items() if name not in used]:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise CheckpointError(
            f"The model has no entry for {', '.join(left[:_SHOWN])}{more} of the file. Give the model that was saved, "
            "or a name_map: what a name_map does not name is left out."
        )


def refuse_unsure(names: NameMap, label: str) -> None:
    """Raises CheckpointError where a proposal has entries that more than one array fits."""
    if not names.unsure:
        return
    shown = [
        f"  {name}: {names[name]}, or {', '.join(other for other in fit if other != names[name])}"
        for name, fit in list(names.unsure.items())[:_SHOWN]
    ]
    more = f"\n  ... and {len(names.unsure) - _SHOWN} more" if len(names.unsure) > _SHOWN else ""
    raise CheckpointError(
        f"{label}: names and shapes do not decide which array belongs to which entry of the model. By order:\n"
        + "\n".join(shown)
        + f"{more}\nIf that is right, pass name_map=fleet.checkpoint.propose_map(model, fleet.checkpoint.read_paddle("
        f"{label!r})); otherwise write your own: propose_map(...).write('names.json'), name_map='names.json'."
    )
