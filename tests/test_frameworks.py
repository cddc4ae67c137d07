"""docs/guides/frameworks.md: every block runs on two workers as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.helpers.sources import ROOT
from tests.helpers.workers import run_workers

pytestmark = pytest.mark.slow
BLOCK = re.compile(r"<!-- example: ([^\n]+) -->\n```python\n(.*?)```", re.DOTALL)
PAGES = ("guides/frameworks.md", "guides/frameworks.zh-CN.md")


def blocks(page: str) -> dict[str, str]:
    """Returns the code blocks of a page by their titles."""
    return dict(BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8")))


def run_blocks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Returns what each block of the English page leaves; the rows of torchmetrics' are this worker's."""
    import warnings

    os.chdir(folder)  # the Trainer of the block logs there
    from tests.helpers import lightning_training as training

    found = blocks("guides/frameworks.md")
    module, scored = training.Classifier(), torch.nn.Linear(6, 3)
    names: dict[str, dict[str, Any]] = {
        "Trainer": {"module": module, "loader": training.loader(4)},
        "Fabric": {
            "model": scored,
            "optimizer": torch.optim.SGD(scored.parameters(), 0.1),
            "criterion": torch.nn.functional.cross_entropy,
            "loader": training.loader(4),
        },
        "torchmetrics": {"loader": list(rows(rank, world_size))},
    }
    for title, body in found.items():
        training.forget_session()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(body, title, "exec"), names[title])
    results = {title: float(value) for title, value in names["torchmetrics"]["found"].items()}
    training.forget_session()
    return {**results, "Trainer": training.weights_of(module), "Fabric": scored.weight.detach()}


def rows(rank: int, world_size: int) -> DataLoader[Any]:
    """Returns the rows of a worker, in batches that together are those of one process."""
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 8, generator=draw), torch.randint(3, (48,), generator=draw))
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(data, batch_size=8 // world_size, sampler=sampler)


def by_hand() -> dict[str, float]:
    """Returns accuracy and mean loss of the rows in plain torch, in one process."""
    torch.manual_seed(0)
    found: dict[str, float] = {}
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hits, losses = 0, 0.0
    for x, y in rows(0, 1):
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        hits, losses = hits + int((logits.argmax(1) == y).sum()), losses + float(loss.detach()) * len(y)
    found["accuracy"], found["loss"] = hits / 48, losses / 48
    return found


def alone(rank: int, world_size: int) -> dict[str, Any]:
    """Returns what the block of torchmetrics finds, with the model of :func:`by_hand`."""
    names: dict[str, Any] = {"loader": list(rows(rank, world_size))}
    body = blocks("guides/frameworks.md")["torchmetrics"].replace("model = ", "torch.manual_seed(0)\nmodel = ", 1)
    exec(compile(body, "torchmetrics", "exec"), names)
    return {title: float(value) for title, value in names["found"].items()}


def test_the_blocks_run(tmp_path: Path) -> None:
    first, second = run_workers(run_blocks, 2, str(tmp_path), backend=None)
    assert first["accuracy"] == second["accuracy"]
    assert first["loss"] == second["loss"]
    assert bool(first["Fabric"].isfinite().all())
    assert torch.equal(first["Fabric"], second["Fabric"])
    for name, value in first["Trainer"].items():
        assert torch.equal(value, second["Trainer"][name]), name


def test_metrics_of_torchmetrics_count_the_rows_of_all_workers() -> None:
    expected = by_hand()
    for found in run_workers(alone, 2, backend=None):
        assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-7)
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_both_pages_have_the_same_blocks() -> None:
    first, second = (blocks(page) for page in PAGES)
    assert first == second
    assert len(first) == 3
