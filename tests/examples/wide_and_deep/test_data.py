"""Ids, and the choice of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler

from tests.examples.wide_and_deep.example import EXAMPLE, example_module, only_this_example, write_criteo
from tests.helpers.ready_python import run_python

data = example_module("data")


def test_an_id_is_the_same_in_every_process() -> None:
    """Workers and servers meet over ids; Python's own hash differs from process to process."""
    line = f"import sys; sys.path.insert(0, {str(EXAMPLE)!r}); import data; print(data.hash_id('carrier', 'UA'))"
    assert int(run_python(line).stdout) == data.hash_id("carrier", "UA") == 3284525204149652516


def test_ids_differ_by_slot_and_value_and_are_never_padding() -> None:
    ids = data.hash_values("a", [str(number) for number in range(10_000)])
    assert ids.dtype == np.int64
    assert len(np.unique(ids)) == 10_000
    assert ids.min() > 0
    assert ids.max() < 2**62
    assert not set(ids) & set(data.hash_values("b", [str(number) for number in range(10_000)]))
    assert data.hash_values("a", ["", "x"])[0] == data.PADDING


def test_a_loader_gives_whole_batches_in_the_order_of_the_sampler() -> None:
    samples = data.Samples(
        np.arange(10).reshape(5, 2), np.ones((5, 1), np.float32), np.array([0, 1, 0, 1, 0], np.float32)
    )
    dataset = samples.dataset()
    loaded = list(data.batches_of(dataset, SequentialSampler(dataset), 2, drop_last=False))
    assert [len(labels) for _, _, labels in loaded] == [2, 2, 1]
    assert loaded[1][0].tolist() == [[4, 5], [6, 7]]
    assert loaded[1][2].tolist() == [0.0, 1.0]
    assert len(data.batches_of(dataset, SequentialSampler(dataset), 2, drop_last=True)) == 2


def test_open_data_reads_files(tmp_path: Path) -> None:
    """Issue 4: the example reads files in Criteo's format too."""
    with only_this_example():
        found = data.open_data(str(write_criteo(tmp_path / "part-0", 50)))
    assert (len(found.train), len(found.test)) == (45, 5)
    assert found.slots == (1,) * 26
    assert found.num_dense == 13
    ids, dense, labels = found.train[[0, 1]]
    assert (ids.dtype, dense.dtype, labels.dtype) == (torch.int64, torch.float32, torch.float32)


def test_an_unknown_source_is_refused(tmp_path: Path) -> None:
    with only_this_example(), pytest.raises(ValueError, match="no such file or folder"):
        data.open_data(str(tmp_path / "absent"))
