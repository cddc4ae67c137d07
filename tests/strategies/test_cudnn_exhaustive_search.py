"""cudnn_exhaustive_search sets cuDNN's switch, and says so where there is no cuDNN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fleet.strategies.cudnn_exhaustive_search import CudnnExhaustiveSearch


def test_sets_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A.1: torch.backends.cudnn.benchmark is on afterwards."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    session: Any = None
    layer = nn.Linear(1, 1)
    assert CudnnExhaustiveSearch(None, session).wrap_model(layer) is layer
    assert torch.backends.cudnn.benchmark


def test_remarks_that_the_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never ignored: without a GPU the plan carries a remark."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "changes nothing on the CPU" in CudnnExhaustiveSearch.notes({}, 1)[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert CudnnExhaustiveSearch.notes({}, 1) == ()
