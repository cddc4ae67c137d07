"""What happens around a write: faults where they are asked for, and pruning by worker 0 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.elastic import folder
from fleet.elastic.faults import Faults
from fleet.elastic.folder import around, hooks


@pytest.mark.parametrize(("rank", "pruned"), [(0, 1), (1, 0)])
def test_worker_0_prunes_after_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, pruned: int
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(folder, "prune", lambda *given: calls.append(given))
    meet, after = around(Faults.read("", rank, 0), tmp_path / "step-3", 3, 2)
    meet("save.begin")
    assert not calls, "nothing is removed before the checkpoint is there"
    after()
    assert len(calls) == pruned
    if pruned:
        assert calls[0][:3] == (tmp_path, 2, tmp_path / "step-3")


def test_a_fault_counts_over_the_saves_of_one_process(tmp_path: Path) -> None:
    given = {"rank": 0, "generation": 0, "trainer": 1, "path": f"{tmp_path}/step-1", "step": 1, "keep": 1}
    hooks("", **given)
    first = folder._FAULTS[""]
    hooks("", **given)
    assert folder._FAULTS[""] is first
