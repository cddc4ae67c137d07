"""Flights, and files in Criteo's format: read as the wide & deep example does, written as one column a slot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from other_example import module_of_wide_and_deep

from formats.columns import Columns, Lists, write_columns


def write_clicks(source: str, folder: Path) -> None:
    """Writes ``impressions/train`` and ``test``: id columns, numbers I1, I2, ..., and ``click``.

    Flights have the slots of the other example, and were late where ``click`` is 1. Criteo's categories are C1 to C26.

    Args:
        source: ``flights``, or the path of a file or folder in Criteo's format.
        folder: where to.

    Raises:
        ValueError: the source cannot be read; the message says where and why.
    """
    slots, parts = _read(source)
    for name, samples in zip(("train", "test"), parts, strict=True):
        columns = {**_slot_columns(slots, samples.ids), **_number_columns(samples.dense), "click": samples.labels}
        write_columns(folder / "impressions" / name / "part-0.parquet", columns)


def _read(source: str) -> tuple[Mapping[str, int], Any]:
    if source == "flights":
        flights = module_of_wide_and_deep("flights")
        return {name.replace(" ", "_"): width for name, width in flights.SLOTS.items()}, flights.read_flights()
    criteo = module_of_wide_and_deep("criteo")
    return {f"C{number}": 1 for number in range(1, criteo.NUM_CATEGORIES + 1)}, criteo.read_criteo(Path(source))


def _slot_columns(slots: Mapping[str, int], ids: NDArray[np.int64]) -> Columns:
    """Returns the columns of the slots: ids, or lists of them without the padding where a slot holds a set."""
    columns: dict[str, NDArray[np.generic] | Lists] = {}
    first = 0
    for name, width in slots.items():
        part = ids[:, first : first + width]
        first += width
        kept = part != 0
        offsets = np.concatenate([[0], np.cumsum(kept.sum(axis=1))])
        columns[name] = np.ascontiguousarray(part[:, 0]) if width == 1 else Lists(part[kept], offsets)
    return columns


def _number_columns(dense: NDArray[np.float32]) -> Columns:
    return {f"I{number + 1}": np.ascontiguousarray(dense[:, number]) for number in range(dense.shape[1])}
