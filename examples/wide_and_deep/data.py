"""Click-through data: feature ids in slots, dense numbers and a label per sample; and where ``--data`` comes from.

An id is a hash of the slot's name and the value's text, so the same value has the same id in every process, on every
machine and in every file, and no vocabulary is needed. Id 0 means "nothing here".
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset

PADDING = 0
# Ids use 62 bits, so that they are never negative as signed 64-bit integers.
ID_MASK = (1 << 62) - 1

Ids = NDArray[np.int64]
Batch = tuple[Tensor, ...]  # ids, dense numbers, labels


class Samples(NamedTuple):
    """Samples in arrays.

    Args:
        ids: int64 (samples, sum of slots); the columns of a slot are adjacent, unused ones hold 0.
        dense: float32 (samples, numbers).
        labels: float32 (samples,), 1.0 or 0.0.
    """

    ids: Ids
    dense: NDArray[np.float32]
    labels: NDArray[np.float32]

    def part(self, rows: slice | NDArray[np.bool_]) -> Samples:
        """Returns some of the samples."""
        return Samples(self.ids[rows], self.dense[rows], self.labels[rows])

    def dataset(self) -> TensorDataset:
        """Returns the same as a torch data set; indexed with a list of rows, it gives a whole batch."""
        return TensorDataset(*(torch.from_numpy(np.ascontiguousarray(array)) for array in self.arrays()))

    def arrays(self) -> tuple[NDArray[np.generic], ...]:
        """Returns the three arrays."""
        return self.ids, self.dense, self.labels


class ClickData(NamedTuple):
    """What a training script needs: training and test data, and the width of each slot."""

    train: TensorDataset
    test: TensorDataset
    slots: tuple[int, ...]
    num_dense: int


def open_data(source: str) -> ClickData:
    """Returns the data that ``--data`` names: ``flights``, or files in Criteo's format (a file or a folder of files).

    Raises:
        ValueError: there is no such file, or a line of one is not in Criteo's format.
    """
    if source == "flights":
        from flights import SLOTS, read_flights

        train, test = read_flights()
        return ClickData(train.dataset(), test.dataset(), tuple(SLOTS.values()), train.dense.shape[1])
    from criteo import NUM_CATEGORIES, read_criteo

    train, test = read_criteo(Path(source))
    return ClickData(train.dataset(), test.dataset(), (1,) * NUM_CATEGORIES, train.dense.shape[1])


def batches_of(dataset: TensorDataset, sampler: Sampler[int], batch_size: int, drop_last: bool) -> DataLoader[Batch]:
    """Returns a loader that slices whole batches from the arrays; row by row would cost more than the training."""
    return DataLoader(dataset, sampler=BatchSampler(sampler, batch_size, drop_last), batch_size=None)


def hash_id(slot: str, value: str) -> int:
    """Returns the id of a value in a slot: from 1 to 2**62 - 1, the same in every process.

    Example:
        >>> hash_id("carrier", "UA") == hash_id("carrier", "UA") != hash_id("origin", "UA")
        True
    """
    digest = blake2b(f"{slot}={value}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ID_MASK or 1


def hash_values(slot: str, values: Sequence[str]) -> Ids:
    """Returns the ids of many values; the empty value has id 0."""
    return np.array([hash_id(slot, value) if value else PADDING for value in values], np.int64)
