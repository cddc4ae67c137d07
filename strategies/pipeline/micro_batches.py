"""Micro-batches: every form of data that train_batch takes, as one list of inputs or of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fleet.errors import ConfigError

_FORMS = (
    "data is (inputs, labels), where each is a tensor, a list of micro-batches, or a tuple or dictionary of these; or "
    "an iterator over (input, label) of micro-batches"
)


class PipelineDatasetPreprocessor:
    """Data that a function makes when train_batch or eval_batch needs it.

    Args:
        function: returns an iterator over (input, label) of micro-batches, or any other form of data.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __call__(self) -> Any:
        """Returns the data."""
        return self.function()


def cut_data(
    data: Any, num_micro: int, size: int, *, inputs: bool, labels: bool
) -> tuple[list[Any] | None, list[Any] | None]:
    """Returns the inputs and the labels of each micro-batch; ``None`` for the half that is not asked for.

    A batch may hold fewer rows than ``num_micro * size``: the last micro-batch is then smaller, or there are fewer.

    Raises ConfigError for data that does not fit.
    """
    if isinstance(data, PipelineDatasetPreprocessor):
        data = data()
    if not inputs and not labels:
        return None, None
    if data is None:
        raise ConfigError(f"train_batch(data) is None, and the first and the last stage need it: {_FORMS}.")
    if isinstance(data, Iterator):
        pairs = _taken(data, num_micro)
        return ([pair[0] for pair in pairs] if inputs else None), ([pair[1] for pair in pairs] if labels else None)
    if not isinstance(data, tuple | list) or len(data) != 2:
        hint = " Pass iter(loader) for a loader of micro-batches." if hasattr(data, "__iter__") else ""
        raise ConfigError(f"train_batch(data) got {_kind(data)}; {_FORMS}.{hint}")
    own_inputs = _cut(data[0], "inputs", num_micro, size) if inputs else None
    own_labels = _cut(data[1], "labels", num_micro, size) if labels else None
    if own_inputs is not None and own_labels is not None and len(own_inputs) != len(own_labels):
        raise ConfigError(different_numbers(len(own_inputs), len(own_labels)))
    return own_inputs, own_labels


def different_numbers(inputs: int, labels: int) -> str:
    """Returns the message for inputs and labels that do not belong together."""
    return (
        f"train_batch(data): the inputs make {inputs} micro-batches and the labels {labels}. Give both the same number "
        "of rows; the first and the last stage must see the same batch."
    )


def _taken(data: Iterator[Any], num_micro: int) -> list[tuple[Any, Any]]:
    pairs: list[tuple[Any, Any]] = []
    for pair in data:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(f"train_batch(data): the iterator gave {_kind(pair)}; it gives (input, label) each time.")
        pairs.append((pair[0], pair[1]))
        if len(pairs) == num_micro:
            break
    if not pairs:
        raise ConfigError("train_batch(data): the iterator is at its end. Make a new one for each epoch.")
    return pairs


def _cut(part: Any, name: str, num_micro: int, size: int) -> list[Any]:
    found = _pieces(part, name, num_micro, size)
    return [part] * num_micro if found is None else found


def _pieces(part: Any, name: str, num_micro: int, size: int) -> list[Any] | None:
    """Returns ``part`` by micro-batch, ``None`` for a value that all micro-batches share."""
    if isinstance(part, Tensor):
        return _rows(part, name, num_micro, size)
    if isinstance(part, list):
        if not 0 < len(part) <= num_micro:
            raise ConfigError(
                f"train_batch(data): the list of {name} has {len(part)} micro-batches; "
                f"pipeline_configs['accumulate_steps'] is {num_micro}."
            )
        return part
    if isinstance(part, tuple | Mapping):
        keys = list(part) if isinstance(part, Mapping) else range(len(part))
        cut = {key: _pieces(part[key], name, num_micro, size) for key in keys}
        counts = {len(pieces) for pieces in cut.values() if pieces is not None}
        if len(counts) > 1:
            raise ConfigError(f"train_batch(data): the parts of {name} make different numbers of micro-batches.")
        if not counts:
            return None
        rows = [
            {key: part[key] if pieces is None else pieces[micro] for key, pieces in cut.items()}
            for micro in range(counts.pop())
        ]
        return rows if isinstance(part, Mapping) else [tuple(row.values()) for row in rows]
    return None


def _rows(tensor: Tensor, name: str, num_micro: int, size: int) -> list[Any]:
    if tensor.dim() == 0:
        raise ConfigError(f"train_batch(data): {name} holds a tensor without rows; micro-batches are cut from rows.")
    count = tensor.shape[0]
    if not 0 < count <= num_micro * size:
        raise ConfigError(
            f"train_batch(data): {name} has {count} rows, and a step takes at most accumulate_steps * micro_batch_size "
            f"= {num_micro} * {size} = {num_micro * size}. Set pipeline_configs to what a worker's batch holds."
        )
    return list(tensor.split(size))


def plan_weights(labels: list[Any]) -> list[float]:
    """Returns the weight of each micro-batch's loss: its part of the rows, so that the sum is the mean of the batch."""
    # A label without rows (a number, a dictionary of settings) says nothing, so all weigh the same.
    counts = [_num_rows(label) for label in labels]
    if len(set(counts)) == 1 or 0 in counts:
        return [1 / len(labels)] * len(labels)
    return [count / sum(counts) for count in counts]


def _num_rows(value: Any) -> int:
    return next((leaf.shape[0] for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _kind(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def described_shapes(values: list[Any] | None) -> str:
    """Returns a text that is the same for data of the same shapes and types."""
    return repr([
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in tree_leaves(values)
    ])  # fmt: skip
