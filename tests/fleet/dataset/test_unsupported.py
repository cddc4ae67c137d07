"""Datasets that cannot exist here."""

from __future__ import annotations

import pytest

import fleet
from fleet.dataset.unsupported import TreeIndex
from fleet.errors import UnsupportedOptionError


@pytest.mark.parametrize("name", ["BoxPSDataset", "FileInstantDataset", "TreeIndex"])
def test_they_say_why(name: str) -> None:
    """B.7."""
    with pytest.raises(UnsupportedOptionError, match=f"fleet.dataset.{name}: "):
        getattr(fleet.dataset, name)()
    assert fleet.dataset.TreeIndex is TreeIndex
    with pytest.raises(AttributeError, match=f"fleet.{name} does not exist: it is not supported, and fleet.dataset"):
        getattr(fleet, name)
