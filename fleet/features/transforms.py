"""Transforms: a list of transforms that a batch goes through, and the file that keeps it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleet.common.plain_files import read_small, replace_file
from fleet.errors import CheckpointError, ConfigError
from fleet.features.column import NUMBERS, FeatureColumn, Transform, Words, of_one_width
from fleet.features.column_transforms import Bucketize, Clip, Cross, Hash, Log, Vocabulary

FILE = "transforms.json"
_OFFSETS = ".offsets"
_KINDS: dict[str, type[Transform]] = {kind.__name__: kind for kind in (Bucketize, Clip, Cross, Hash, Log, Vocabulary)}
_BITS = 2**64 - 1
_MOST_BYTES = 1 << 30


class Transforms:
    """Transforms in the order in which they are applied; each row gives the same result in any batch.

    Called with a batch, a mapping of columns, it returns the batch with the columns that the transforms write; the
    mapping stays as it is. A column is an array, a list or a tensor of numbers or text, one entry a row. A bag is two
    columns: its flat values under its name, and where each row begins under ``NAME.offsets``, as
    ``fleet.ParquetDataset`` gives them and ``fleet.SparseEmbedding`` takes them. Text that a transform has read is left
    out. Where an input column is a tensor, the output is a tensor on the same device, though the CPU does the work; of
    several inputs the first tensor decides.

    Args:
        transforms: the transforms, first to last.

    Raises:
        ConfigError: a transform reads another kind than a transform before it writes, or replaces a column of another
            transform that it does not read.
    """

    def __init__(self, transforms: Sequence[Transform]) -> None:
        if not isinstance(transforms, Iterable):
            raise ConfigError(f"Transforms({transforms!r:.100}) takes a list of transforms; write [...] around it.")
        self._transforms = tuple(transforms)
        kinds: dict[str, str | None] = {}
        readers: set[str] = set()
        for one in self._transforms:
            if not isinstance(one, Transform):
                raise ConfigError(f"Transforms: {one!r:.100} is no transform. Give a list of {', '.join(_KINDS)}.")
            for name in one.inputs:
                kind = kinds.get(name)
                if kind is not None and kind not in one.takes:
                    raise ConfigError(f"{one!r:.200} reads {' or '.join(one.takes)}; {name!r} is {kind} by then.")
            if one.output in kinds and one.output not in one.inputs:
                raise ConfigError(
                    f"{one!r:.200}: another transform writes {one.output!r} before. Give it a name of its own."
                )
            if one.output in readers and one.output not in (*one.inputs, *kinds):
                raise ConfigError(
                    f"{one!r:.200} writes {one.output!r}, which a transform before it reads. Put it first."
                )
            kinds[one.output] = one.gives or kinds.get(one.inputs[0])
            readers.update(one.inputs)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self._transforms)

    def __len__(self) -> int:
        return len(self._transforms)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transforms) and self._transforms == other._transforms

    def __hash__(self) -> int:
        return hash(self._transforms)

    def __repr__(self) -> str:
        return f"Transforms([{', '.join(map(repr, self._transforms))}])"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that a batch must have, in the order in which they are read first."""
        written: set[str] = set()
        needed: dict[str, None] = {}
        for one in self._transforms:
            needed.update({name: None for name in one.inputs if name not in written})
            written.add(one.output)
        return tuple(needed)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The columns that are written."""
        return tuple(dict.fromkeys(one.output for one in self._transforms))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the batch with the columns that the transforms write.

        Raises:
            ConfigError: a column is missing, of another kind or number of rows than the others, or would be replaced.
        """
        if not hasattr(batch, "items"):
            first = next(iter(self.inputs), "site")
            raise ConfigError(
                f"fleet.features: Transforms takes a mapping of columns, such as {{{first!r}: [...]}}; it was called "
                f"with {type(batch).__name__}."
            )
        columns = {name: _column(name, batch) for name in self.inputs}
        _check_rows(columns)
        devices = {name: batch[name].device for name in columns if _is_tensor(batch[name])}
        self.check({name: column.kind for name, column in columns.items()}, batch)
        outputs = self.apply(columns)
        for one in self._transforms:
            device = next((devices[name] for name in one.inputs if name in devices), None)
            if device is not None:
                devices[one.output] = device
        gone = {name for name, column in columns.items() if column.kind == "text"}.union(self.outputs)
        found = {name: value for name, value in batch.items() if name.removesuffix(_OFFSETS) not in gone}
        for name in self.outputs:
            column = outputs[name]
            found[name] = _on_device(column.values, devices.get(name))
            if column.ends is not None:
                found[name + _OFFSETS] = _on_device(column.ends[:-1], devices.get(name))
        return found

    def check(self, kinds: Mapping[str, str], present: Mapping[str, Any]) -> None:
        """Raises ConfigError unless columns of these kinds can be transformed and none of ``present`` is replaced."""
        known = dict(kinds)
        written: set[str] = set()
        for one in self._transforms:
            for name in one.inputs:
                if known[name] not in one.takes:
                    raise ConfigError(f"{one!r:.200} reads {' or '.join(one.takes)}; column {name!r} is {known[name]}.")
            if one.output in present and one.output not in (*one.inputs, *written):
                raise ConfigError(f"{one!r:.200}: the batch has a column {one.output!r}. Give out= another name.")
            known[one.output] = one.gives or known[one.inputs[0]]
            written.add(one.output)

    def apply(self, columns: Mapping[str, FeatureColumn]) -> dict[str, FeatureColumn]:
        """Returns the columns, which :meth:`check` has seen, and those that the transforms write."""
        found = dict(columns)
        for one in self._transforms:
            found[one.output] = one.apply([found[name] for name in one.inputs])
        return found

    # -- files -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Returns the transforms as JSON."""
        listed = [{"kind": type(one).__name__, **one.to_fields()} for one in self._transforms]
        return json.dumps({"format": 1, "transforms": listed}, ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Transforms:
        """Returns what :meth:`to_json` described.

        Raises:
            CheckpointError: it is nothing of this kind, or a later release wrote it.
        """
        try:
            found = json.loads(text)
            if found["format"] != 1:
                raise CheckpointError(f"fleet.features: saved in format {found['format']!r}; this release reads 1.")
            unknown = sorted(set(found) - {"format", "transforms"})
            if unknown:
                raise CheckpointError(f"fleet.features: {unknown} mean nothing in saved transforms of format 1.")
            listed = [dict(one) for one in found["transforms"]]
            kinds = [one.pop("kind") for one in listed]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"fleet.features: these are no saved transforms ({error!s:.100}).") from None
        strange = sorted({str(kind) for kind in kinds if kind not in _KINDS})
        if strange:
            raise CheckpointError(f"fleet.features: no transform is named {strange}. There are {sorted(_KINDS)}.")
        try:
            return cls([_KINDS[kind].from_fields(one) for kind, one in zip(kinds, listed, strict=True)])
        except TypeError as error:
            raise CheckpointError(f"fleet.features: a saved value is of another type ({error!s:.100}).") from None

    def save(self, path: str | Path) -> Path:
        """Writes ``transforms.json`` into a folder, which is made when missing; returns the file.

        A path that ends with ``.json`` is the file itself. ``fleet.save_inference_model(transforms=...)`` does it
        beside the model.

        Raises:
            ConfigError: the path is no path.
            CheckpointError: it cannot be written.
        """
        if not isinstance(path, str | Path) or not str(path):
            raise ConfigError(f"Transforms.save({path!r:.100}) takes a folder, or a file that ends with .json.")
        target = Path(path) if Path(path).suffix == ".json" and not Path(path).is_dir() else Path(path) / FILE
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            replace_file(target, self.to_json())
        except OSError as error:
            raise CheckpointError(f"Transforms.save(): {target} cannot be written: {error.strerror}.") from None
        return target

    @classmethod
    def load(cls, path: str | Path) -> Transforms:
        """Returns the transforms in a file, or in a folder's ``transforms.json``.

        Raises:
            CheckpointError: there are none, or they are damaged.
        """
        target = Path(path) / FILE if Path(path).is_dir() else Path(path)
        try:
            text = read_small(target, _MOST_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{target}: cannot be read: {error}.") from None
        try:
            return cls.from_json(text)
        except CheckpointError as error:
            raise CheckpointError(f"{target}: {error}") from None


def _check_rows(columns: Mapping[str, FeatureColumn]) -> None:
    """Raises ConfigError unless all columns have as many rows."""
    counts = {name: column.num_rows for name, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"fleet.features: the columns of a batch have one entry a row, and these have different numbers: {counts}. "
            f"Of a bag, NAME{_OFFSETS} says where its rows begin."
        )


def _is_tensor(value: object) -> bool:
    # Without an import: who has a tensor has torch, and a serving process without one need not load it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _on_device(values: Any, device: Any) -> Any:
    """Returns an array, or with a device a tensor on it."""
    if device is None:
        return values
    return sys.modules["torch"].from_numpy(np.ascontiguousarray(values)).to(device)


def _array(value: Any) -> Any:
    if not _is_tensor(value):
        return np.asarray(value)
    value = value.detach().cpu()
    return (value.float() if value.dtype == sys.modules["torch"].bfloat16 else value).numpy()


def _check_alike(name: str, values: Sequence[Any]) -> None:
    """Raises ConfigError where an integer of a list would become another number because of its neighbours."""
    changed = [one for one in values if isinstance(one, int | np.integer) and int(np.float32(one)) != int(one)]
    if changed:
        raise ConfigError(
            f"fleet.features: column {name!r} holds the integer {changed[0]} beside fractions, and as float32 it would "
            "be another number than alone. Give all of a column as integers, or all as floating-point numbers."
        )


def _column(name: str, batch: Mapping[str, Any]) -> FeatureColumn:
    """Returns a column of a batch; raises ConfigError where it is missing or holds something else."""
    if name not in batch:
        raise ConfigError(f"fleet.features: the batch has no column {name!r}; it has {sorted(map(str, batch))}.")
    try:
        values = _array(batch[name])
        if isinstance(batch[name], list | tuple):
            if not values.size:
                values = values.astype(np.int64)  # every transform takes it
            elif values.dtype.kind in "OUS":
                values = np.asarray(batch[name], object)  # numpy's text loses zeros at its end, and takes 7 for "7"
            elif values.dtype == np.float64 and all(isinstance(one, int | np.integer) for one in batch[name]):
                # numpy makes floats of integers on both sides of 2**63
                values = np.array([int(one) & _BITS for one in batch[name]], np.uint64)
    except ValueError:
        raise ConfigError(
            f"fleet.features: column {name!r} has rows of different lengths; write a bag as flat values and "
            f"{name + _OFFSETS!r}, where each row begins."
        ) from None
    if isinstance(batch[name], list | tuple) and values.dtype == np.float64:
        _check_alike(name, batch[name])
    if values.dtype.kind in "OUS" and values.ndim:
        words = Words.of(name, values.tolist() if values.dtype.kind == "S" else values)
        column = FeatureColumn(words)
        count = len(words.codes)
    elif values.dtype.kind in NUMBERS and values.ndim:
        column = FeatureColumn(of_one_width(values))
        count = len(values)
    else:
        raise ConfigError(
            f"fleet.features: column {name!r} is {values.dtype} of shape {values.shape}; it is numbers or text, one or "
            "more for each row; for one row, a list of one."
        )
    if name + _OFFSETS not in batch:
        return column
    offsets = _array(batch[name + _OFFSETS])
    is_whole = offsets.dtype.kind in "iu" or not offsets.size
    ends = np.concatenate([offsets, [count]]).astype(np.int64) if is_whole else np.array([1])
    if ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ConfigError(f"fleet.features: {name + _OFFSETS!r} says where bags begin: integers that ascend from 0.")
    return FeatureColumn(column.values, ends)
