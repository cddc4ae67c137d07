"""A small simulated shop, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples.recommenders.example import example_module


@pytest.fixture(scope="session")
def shop() -> Any:
    """Returns 4 days of a shop with 100,000 impressions."""
    settings = example_module("simulator.settings").Settings(users=3000, items=2000, days=4, impressions=100_000)
    return example_module("simulator.files").simulate(settings)


@pytest.fixture(scope="session")
def folder(shop: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of its files."""
    path = tmp_path_factory.mktemp("shop")
    example_module("simulator.files").write_shop(shop, path)
    return path
