"""What tests of scripts share: one process that imports torch for all of them, and a script that is tried."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.verify.paired_runs import Starter, process_starter
from tests.helpers.trials import Try, attempts


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    """Starts the processes of all scripts of a file: torch is imported once."""
    with process_starter(tmp_path_factory.mktemp("starter")) as start:
        yield start


@pytest.fixture
def attempt(starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Try:
    """Tries a script in ``work`` beside what a test has put there."""
    made = attempts(starter, tmp_path)
    monkeypatch.chdir(tmp_path / "work")
    return made
