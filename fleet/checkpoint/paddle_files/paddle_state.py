"""Parameters of a Paddle file as a torch model's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fleet.checkpoint.paddle_files.paddle_names import (
    check_shapes,
    check_ties,
    entries_of,
    paddle_kind,
    propose_map,
    read_name_map,
    refuse_unsure,
    torch_name,
)
from fleet.checkpoint.paddle_files.paddle_pickle import PaddleState, entry_of, read_paddle
from fleet.errors import CheckpointError

_MASTERS = "master_weights"


def paddle_state(
    path: str | Path | PaddleState, name_map: Mapping[str, str] | str | Path | None = None, *,
    model: nn.Module | None = None, transpose: Iterable[str] | None = None, masters: str | Path | None = None,
    key: str | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Returns the parameters of a ``.pdparams`` file as ``model.load_state_dict`` takes them.

    Weights of linear layers are transposed to [out, in]: those of ``nn.Linear`` in ``model``. Without a model, those
    whose own name in Paddle says so (``linear_0.w_0``), and those in ``transpose``. Batch norms' ``_mean`` and
    ``_variance`` become ``running_mean`` and ``running_var``. Dtypes stay.

    Args:
        path: the file, or what :func:`read_paddle` or :func:`paddle_dense` returned.
        name_map: the model's names to Paddle's, as a dictionary or as a JSON file; what it does not name is left out.
            Without it and with a model, :func:`propose_map` must find one possibility; without both, names stay.
        model: the model that will take the state, not divided over workers; it is not changed.
        transpose: Paddle's names of further weights to transpose; only without a model.
        masters: a ``.pdopt`` file with master weights, which take the place of the parameters of 16 bits.
        key: which entry of a file that holds several dictionaries.

    Raises:
        CheckpointError: the file is none of Paddle's, names or shapes do not fit the model, more than one array fits
            an entry, or nothing says whether a matrix is transposed.

    Example:
        >>> model.load_state_dict(fleet.checkpoint.paddle_state("model.pdparams", model=model))
        <All keys matched successfully>
    """
    label = "the state" if isinstance(path, PaddleState) else str(path)
    arrays = PaddleState(path, path.parameter_names) if isinstance(path, PaddleState) else read_paddle(path)
    if key is not None:
        arrays = entry_of(arrays, key, label)
    if masters is not None:
        _put_masters(arrays, read_paddle(masters), label, str(masters))
    if model is not None:
        if transpose is not None:
            raise CheckpointError("transpose goes without a model: with one, the types of its modules decide.")
        return _for_model(arrays, name_map, model, label)
    if name_map is None:
        names = {torch_name(name): name for name in arrays.tensors()}
    else:
        names = read_name_map(name_map)
        _check_names(names, arrays, label)
    turned = _transposed_by_name(arrays, set(names.values()), transpose, label)
    return {ours: _turned(arrays[theirs], theirs in turned) for ours, theirs in names.items()}


def map_for(
    arrays: PaddleState, name_map: Mapping[str, str] | str | Path | None, model: nn.Module, label: str
) -> dict[str, str]:
    """Returns the given or the only possible name map of a whole model, checked against both sides."""
    if name_map is None:
        proposed = propose_map(model, arrays)
        refuse_unsure(proposed, label)
        check_ties(model, proposed, arrays, label)
        return proposed
    names = read_name_map(name_map)
    entries = entries_of(model)
    _check_names(names, arrays, label)
    if unknown := sorted(set(names) - set(entries)):
        raise CheckpointError(f"name_map names {unknown[:5]}, which the model's state_dict() does not have.")
    if missing := [name for name in entries if name not in names]:
        raise CheckpointError(f"name_map has no array for {missing[:5]} of the model.")
    check_shapes(entries, names, {name: tuple(value.shape) for name, value in arrays.tensors().items()})
    check_ties(model, names, arrays, label)
    return names


def _for_model(
    arrays: PaddleState, name_map: Mapping[str, str] | str | Path | None, model: nn.Module, label: str
) -> dict[str, Tensor]:
    names = map_for(arrays, name_map, model, label)
    state = {name: _turned(arrays[names[name]], entry.is_transposed) for name, entry in entries_of(model).items()}
    # Paddle does not count batches; the count matters to torch only with momentum=None, which Paddle does not have.
    counts = [name for name in model.state_dict() if name.rpartition(".")[2] == "num_batches_tracked"]
    return state | {name: torch.tensor(0) for name in counts}


def _turned(tensor: Tensor, is_transposed: bool) -> Tensor:
    return tensor.t().contiguous() if is_transposed else tensor


def _check_names(names: Mapping[str, str], arrays: PaddleState, label: str) -> None:
    found = arrays.tensors()
    if wrong := sorted({theirs for theirs in names.values() if theirs not in found}):
        raise CheckpointError(f"name_map names {wrong[:5]}, which {label} does not have. It has {list(found)[:5]}, ...")


def _transposed_by_name(arrays: PaddleState, taken: set[str], transpose: Iterable[str] | None, label: str) -> set[str]:
    """Returns the names of the linear weights; raises CheckpointError for matrices of unknown layers."""
    given = set(transpose or ())
    if isinstance(transpose, str) or (unknown := sorted(given - set(arrays.tensors()))):
        raise CheckpointError(
            f"transpose={transpose!r}: it must list names of {label}"
            + ("." if isinstance(transpose, str) else f"; {unknown[:5]} are none.")
        )
    kinds = {name: paddle_kind(arrays.parameter_names.get(name, name)) for name in taken}
    linear = {name for name, kind in kinds.items() if kind == "linear" and arrays[name].dim() == 2}
    if transpose is None:
        unclear = sorted(name for name, kind in kinds.items() if not kind and arrays[name].dim() == 2)
        if unclear:
            raise CheckpointError(
                f"{label}: nothing says whether {unclear[:5]} are weights of linear layers, which torch has "
                "transposed. Pass the model, or transpose=[...] with those that are (an empty list if none is)."
            )
    if not all(arrays[name].dim() == 2 for name in given):
        raise CheckpointError(f"transpose={sorted(given)}: only matrices can be transposed.")
    return linear | given


def _put_masters(arrays: PaddleState, saved: PaddleState, label: str, masters_label: str) -> None:
    masters = saved.get(_MASTERS)
    if not isinstance(masters, PaddleState) or not masters:
        raise CheckpointError(f"masters={masters_label!r}: the file has no master weights. Omit masters.")
    by_own = {arrays.parameter_names.get(name, name): name for name in arrays.tensors()}
    for own, master in masters.tensors().items():
        name = by_own.get(own)
        if name is None or arrays[name].shape != master.shape:
            raise CheckpointError(
                f"masters={masters_label!r}: {label} has no parameter {own!r} of the shape {list(master.shape)}. The "
                "two files must be of one save."
            )
        arrays[name] = master
