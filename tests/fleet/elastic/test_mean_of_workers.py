"""The mean of the states that each worker has saved for itself, and which meshes have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.checkpoint.boxes import HeldBox
from fleet.checkpoint.commit import Share, read_index, write_share
from fleet.checkpoint.data_files import FileBlock, in_file_order
from fleet.checkpoint.items import raw_bytes
from fleet.checkpoint.storage import LocalFolder
from fleet.elastic.places import MeanOfWorkers, has_own_states, reason_against_mean
from fleet.errors import CheckpointError

WINDOW = {"batch": 2, "sums": {"$": "dict", "items": []}, "k_steps": 3}


def saved_by_two(folder: Path) -> MeanOfWorkers:
    """Returns the mean of two workers, whose weights are 0, 1, 2, 3 and 4, 4, 4, 4."""
    for rank, weight in ((1, torch.full((4,), 4.0)), (0, torch.arange(4.0))):
        tensors = {"model/w": weight, "model/count": torch.tensor([7 + rank]), "optimizer/w/momentum": weight + 10}
        named = {f"@{rank}/{name}": value for name, value in tensors.items()}
        blocks = in_file_order(
            FileBlock(name, f"{value.dtype}".removeprefix("torch."), tuple(value.shape), (0,), tuple(value.shape))
            for name, value in named.items()
        )
        values = {
            f"@{rank}/optimizer/+merge": WINDOW,
            f"@{rank}/optimizer/groups@0": [{"params": [], "settings": {"lr": rank}}],
        }
        share = Share("ab", rank, 2, blocks, values, {f"@{rank}/model/tied": f"@{rank}/model/w"})
        write_share(LocalFolder(folder), share, raw_bytes(named[block.name] for block in blocks))
    index = read_index(LocalFolder(folder))
    assert has_own_states(index)
    return MeanOfWorkers(LocalFolder(folder), index, 2)


def test_the_model_is_the_mean_and_the_optimizer_the_first(tmp_path: Path) -> None:
    source = saved_by_two(tmp_path)
    assert source.whole("model/w").tolist() == source.whole("model/tied").tolist() == [2.0, 2.5, 3.0, 3.5]
    assert source.whole("model/count").tolist() == [7]
    assert source.whole("optimizer/w/momentum").tolist() == [10.0, 11.0, 12.0, 13.0]
    assert source.below("optimizer/w") == ["momentum"]
    assert source.index.values["optimizer/groups@0"] == [{"params": [], "settings": {"lr": 0}}]
    assert source.index.values["optimizer/+merge"] == {**WINDOW, "batch": 0, "sums": {}}
    part = torch.zeros(2)
    source.fill("model/w", [HeldBox((1,), part)])
    assert part.tolist() == [2.5, 3.0]


def test_the_models_of_all_workers_are_verified(tmp_path: Path) -> None:
    box = HeldBox((0,), torch.empty(4))
    saved_by_two(tmp_path).verify("model/w", [box])
    (path,) = tmp_path.glob("data-*-00001.safetensors")
    data = path.read_bytes()
    at = data.index(torch.full((4,), 4.0).numpy().tobytes())
    path.write_bytes(data[:at] + b"\1" + data[at + 1 :])
    damaged = MeanOfWorkers(LocalFolder(tmp_path), read_index(LocalFolder(tmp_path)), 2)
    damaged.verify("optimizer/w/momentum", [box])
    with pytest.raises(CheckpointError, match="do not match their sum"):
        damaged.verify("model/w", [box])


@pytest.mark.parametrize(
    ("degrees", "reason"),
    [
        ({}, ""),
        ({"dp": 4}, ""),
        ({"dp": 2, "mp": 2}, "a state for each worker of another mesh"),
        ({"dp": 2, "sharding": 2}, "saved by 4 workers with sharded parameters"),
    ],
)
def test_parts_of_a_model_have_no_mean(degrees: dict[str, Any], reason: str) -> None:
    found = reason_against_mean("step-1", {"world_size": 4, "degrees": degrees})
    assert reason in found
    assert bool(found) == bool(reason)
