"""Lightning's Trainer with FleetStrategy: users' scripts on two workers train as Lightning alone does in one process.

Importing Lightning takes seconds, so whole lists of scripts share their processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.workers import run_workers

pytestmark = pytest.mark.slow
ALONE: dict[str, str | None] = dict.fromkeys(
    ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
)


def run_cases(rank: int, world_size: int, kind: str, folder: str) -> dict[str, Any]:
    """Runs all cases of ``kind``; Lightning is imported here, and not where tests are collected."""
    from tests.helpers import lightning_cases

    return lightning_cases.run(rank, world_size, kind, folder)


def compare(kind: str, folder: Path) -> None:
    """Raises AssertionError unless all cases of ``kind`` have the results of one process."""
    (alone,) = run_workers(run_cases, 1, kind, str(folder / "alone"), backend=None, timeout_s=300, environment=ALONE)
    first, second = run_workers(run_cases, 2, kind, str(folder / "two"), backend=None, timeout_s=300)
    assert len(first) > len(alone) > 4
    for title, found in first.items():
        expected = alone[title.partition(" stage")[0]]
        assert found.keys() == expected.keys(), title
        for name, value in found.items():
            where = f"{title}: {name}"
            if isinstance(value, torch.Tensor | float):
                torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=where)
                torch.testing.assert_close(second[title][name], value, atol=0, rtol=0, msg=f"{where} of worker 1")
            else:
                assert value == expected[name] == second[title][name], where


def test_scripts_train_as_in_one_process(tmp_path: Path) -> None:
    compare("trainer", tmp_path)
