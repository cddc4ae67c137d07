"""Slots: what use_var may hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fleet.dataset.slots import Slot, read_slots
from fleet.errors import ConfigError


def test_a_slot_reads_shape_and_dtype_as_fleet_writes_them() -> None:
    """B.7: use_var, lod_level >= 1 is sparse, else dense with dims."""
    slot = Slot("dense", (None, 2, 3), "float32")  # type: ignore[arg-type]
    assert (slot.dims, slot.width, slot.is_sparse, slot.is_float) == ((2, 3), 6, False, True)
    assert Slot("x", (13,), torch.float32).dims == (13,)
    assert Slot("words", (-1, 1), "int64", 1).width == 0
    assert Slot("words").dtype is torch.int64


@pytest.mark.parametrize("dtype", ["float64", torch.int32, "bool", np.float64, None])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    """B.7: dtype float32/int64, else ValueError."""
    with pytest.raises(ValueError, match="int64 or float32"):
        Slot("x", (-1, 1), dtype)


@pytest.mark.parametrize("dtype", [np.int64, np.dtype("int64"), "INT64", "VarType.INT64", torch.long])
def test_every_spelling_of_int64(dtype: Any) -> None:
    assert Slot("x", (-1, 1), dtype).dtype is torch.int64


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"name": ""}, "takes a name"),
        ({"lod_level": 2}, "no deeper nesting"),
        ({"shape": (-1, 0)}, "sizes are positive"),
        ({"shape": (-1, -1)}, "only the first"),
        ({"shape": (-1, 4), "lod_level": 1}, "single values"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Slot(**{"name": "x", **fields})


def test_use_var_takes_variables_of_a_fleet_script() -> None:
    variable = SimpleNamespace(name="words", shape=[-1, 1], dtype="VarType.INT64", lod_level=1)
    assert read_slots([variable]) == (Slot("words", (-1, 1), "int64", 1),)


@pytest.mark.parametrize(
    ("use_var", "rule"),
    [("words", "takes a list"), ([3], "holds 3"), ([Slot("a"), Slot("a")], "more than once"), (None, "takes a list")],
)
def test_use_var_refuses_the_rest(use_var: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        read_slots(use_var)
