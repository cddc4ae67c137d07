from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet import features, fleet
from fleet.errors import ConfigError
from fleet.ps_job.inference_model import save_model

IDS = torch.tensor([1, 2])


class Saves:
    """Takes the place of a trainer: notes what the servers would save."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def save(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def saved(folder: Path, example_inputs: Any, transforms: Any = None, *, first: bool = True) -> list[tuple[Any, ...]]:
    trainer = Saves()
    model = fleet.SparseEmbedding(2, name="ads")
    save_model(trainer, model, str(folder), 0, example_inputs, transforms, first=first)  # type: ignore[arg-type]
    return trainer.calls


@pytest.mark.slow
def test_the_first_worker_writes_beside_the_servers(tmp_path: Path) -> None:
    assert saved(tmp_path, (IDS,)) == [(str(tmp_path), 0)]
    assert {"model.pt", "export.json"} < {path.name for path in tmp_path.iterdir()}
    assert saved(tmp_path / "state", None) == [(str(tmp_path / "state"), 0)]
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["model.pt"]
    assert saved(tmp_path / "other", (IDS,), first=False) == [(str(tmp_path / "other"), 0)]
    assert not (tmp_path / "other").exists()


def test_transforms_are_kept_beside_the_state(tmp_path: Path) -> None:
    transforms = features.Transforms([features.Hash("site", out="ads")])
    saved(tmp_path, None, transforms)
    assert features.Transforms.load(tmp_path) == transforms
    saved(tmp_path, None, first=False)
    assert features.Transforms.load(tmp_path) == transforms
    saved(tmp_path, None)  # a model without them: those of the older one are not its own
    assert not (tmp_path / "transforms.json").exists()
    with pytest.raises(ConfigError, match="it is a fleet.features.Transforms"):
        saved(tmp_path / "other", None, [features.Hash("site")])
    assert not (tmp_path / "other").exists()


def test_wrong_examples_are_refused_before_anything_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes a tuple"):
        saved(tmp_path, IDS)
    assert list(tmp_path.iterdir()) == []


class Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ads = fleet.SparseEmbedding(2, name="ads")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.sum() for row in self.ads(ids)])


@pytest.mark.parametrize("first", [True, False])
def test_a_model_of_one_batch_size_is_refused_before_anything_is_saved(tmp_path: Path, first: bool) -> None:
    """By every worker: the others would wait for one that is alone in it."""
    trainer = Saves()
    with pytest.raises(ConfigError, match=r"its program does not.*test_inference_model.py, line .*self.ads\(ids\)"):
        save_model(trainer, Loops(), str(tmp_path), 0, (IDS,), None, first=first)  # type: ignore[arg-type]
    assert trainer.calls == []
    assert list(tmp_path.iterdir()) == []
