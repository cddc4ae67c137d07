"""Slot: one named input of a sample; and the reader of ``use_var``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from fleet.errors import ConfigError

_DTYPES = {"int64": torch.int64, "long": torch.int64, "float32": torch.float32, "float": torch.float32}


@dataclass(frozen=True)
class Slot:
    """One named input: ids or floats, a variable number of them (sparse) or a fixed one (dense).

    Args:
        name: name of the slot, the key in each batch.
        shape: of a batch, as in ``paddle.static.data``; the leading -1 or None is the batch. ``(-1, 13)`` means 13
            values in each sample. A sparse slot has rows of one value: ``(-1, 1)``.
        dtype: ``torch.int64`` or ``torch.float32``, or their names.
        lod_level: 0: dense, a tensor ``[batch, *shape[1:]]``. 1: sparse, values and offsets.

    Raises:
        ConfigError: another dtype (Fleet's rule), or an impossible shape.

    Example:
        >>> Slot("dense", (-1, 13), "float32").width
        13
    """

    name: str
    shape: tuple[int | None, ...] = (-1, 1)
    dtype: torch.dtype | str = "int64"
    lod_level: int = 0
    dims: tuple[int, ...] = field(init=False, default=(), compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"Slot(name={self.name!r}) takes a name.")
        # torch.int64, numpy's int64 and Paddle's VarType.INT64 all end with the name of the type.
        kind = str(self.dtype).rpartition(".")[2].strip("'<>").lower()
        if kind not in _DTYPES:
            raise ConfigError(f"Slot({self.name!r}, dtype={self.dtype!r}): slots hold int64 or float32.")
        if type(self.lod_level) is not int or self.lod_level not in (0, 1):
            raise ConfigError(
                f"Slot({self.name!r}, lod_level={self.lod_level!r}): 0 is dense, 1 is sparse; the text form has no "
                "deeper nesting."
            )
        shape = tuple(-1 if size is None else size for size in self.shape)
        dims = shape[1:] if shape[:1] == (-1,) else shape
        if not all(type(size) is int and size > 0 for size in dims):
            raise ConfigError(
                f"Slot({self.name!r}, shape={self.shape!r}): sizes are positive; only the first may be -1, the batch."
            )
        if self.lod_level and prod(dims) != 1:
            raise ConfigError(
                f"Slot({self.name!r}, shape={self.shape!r}, lod_level=1): a sparse slot has single values, (-1, 1)."
            )
        for name, value in (("shape", shape), ("dtype", _DTYPES[kind]), ("dims", dims)):
            object.__setattr__(self, name, value)

    @property
    def is_sparse(self) -> bool:
        """Whether samples may hold different numbers of values."""
        return self.lod_level > 0

    @property
    def is_float(self) -> bool:
        """Whether the values are float32; int64 otherwise."""
        return self.dtype is torch.float32

    @property
    def width(self) -> int:
        """Number of values in each sample of a dense slot; 0 for a sparse one."""
        return 0 if self.is_sparse else prod(self.dims)


def read_slots(use_var: Any) -> tuple[Slot, ...]:
    """Returns the slots in ``use_var``, in the order of the text.

    Args:
        use_var: Slots, or objects with ``name``, ``shape``, ``dtype`` and ``lod_level``, such as Paddle's variables.

    Raises:
        ConfigError: something else, or a duplicate name.
    """
    if not isinstance(use_var, Sequence) or isinstance(use_var, str):
        raise ConfigError(f"init(use_var={use_var!r}) takes a list of fleet.dataset.Slot.")
    slots = tuple(_slot_of(entry) for entry in use_var)
    names = [slot.name for slot in slots]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"init(use_var=...) names {twice} more than once; each slot has its own name.")
    return slots


def _slot_of(entry: Any) -> Slot:
    if isinstance(entry, Slot):
        return entry
    try:
        return Slot(entry.name, tuple(entry.shape), entry.dtype, int(getattr(entry, "lod_level", 0)))
    except (AttributeError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"init(use_var=...) holds {entry!r}; it takes fleet.dataset.Slot(name, shape, dtype, lod_level)."
        ) from None
