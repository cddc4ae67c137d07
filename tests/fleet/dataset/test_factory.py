"""Datasets made by the name of their class."""

from __future__ import annotations

from pathlib import Path

import pytest

import fleet
from fleet.errors import ConfigError, UnsupportedOptionError
from tests.fleet.dataset.files import SLOTS, write_files


@pytest.mark.parametrize("name", ["InMemoryDataset", "QueueDataset"])
def test_a_dataset_of_a_1x_script(name: str, tmp_path: Path) -> None:
    """B.7: create_dataset, the set_ calls, and the samples come."""
    dataset = fleet.DatasetFactory().create_dataset(name)
    assert type(dataset) is getattr(fleet, name)
    dataset.set_use_var(SLOTS)
    dataset.set_batch_size(2)
    dataset.set_thread(1)
    dataset.set_pipe_command("cat")
    dataset.set_filelist(write_files(tmp_path, [3]))
    if name == "InMemoryDataset":
        dataset.load_into_memory()
    assert [len(batch["label"]) for batch in dataset] == [2, 1]


def test_other_names() -> None:
    """The default is Fleet's; what is not offered and what does not exist say so."""
    assert type(fleet.DatasetFactory().create_dataset()) is fleet.QueueDataset
    with pytest.raises(UnsupportedOptionError, match="says why"):
        fleet.DatasetFactory().create_dataset("BoxPSDataset")
    with pytest.raises(ConfigError, match="Did you mean 'InMemoryDataset'"):
        fleet.DatasetFactory().create_dataset("InMemoryDatase")
