"""Checkpoints of torch.distributed.checkpoint: torch reads what is written; metadata that would run code does not."""

from __future__ import annotations

import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fleet.checkpoint.conversion.formats import Asked
from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.readers.dcp import METADATA, open_state
from fleet.checkpoint.readers.dcp import write_state as write_dcp
from fleet.errors import CheckpointError
from tests.helpers.many_tensors import comparable, many_entries, many_tensors
from tests.helpers.workers import run_workers


def save(tree: Any, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_checkpoint.save(tree, checkpoint_id=folder, no_dist=True)
    return folder


def metadata(folder: Path) -> Metadata:
    found = pickle.loads((folder / METADATA).read_bytes())
    assert isinstance(found, Metadata)
    return found


def changed(folder: Path, found: Metadata) -> Path:
    (folder / METADATA).write_bytes(pickle.dumps(found))
    return folder


@pytest.mark.parametrize("tree", [many_tensors(), many_entries()], ids=["state_dict", "entries"])
def test_a_checkpoint_comes_back_bit_for_bit(tree: Any, tmp_path: Path) -> None:
    state = open_state(save(tree, tmp_path / "a"), Asked())
    assert comparable(tree_of_state(state)) == comparable(tree)
    write_dcp(state, tmp_path / "b")
    assert comparable(tree_of_state(open_state(tmp_path / "b", Asked()))) == comparable(tree)


def test_torch_loads_what_is_written(tmp_path: Path) -> None:
    tree = many_entries()
    write_dcp(state_of_tree(tree, "x", "a tree", None), tmp_path / "a")
    into = many_entries()
    for value in (*into["model"].values(), *[v for s in into["optimizer"]["state"].values() for v in s.values()]):
        value.zero_()
    into["epoch"] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_checkpoint.load(into, checkpoint_id=tmp_path / "a", no_dist=True)
    assert comparable(into["model"]) == comparable(tree["model"])
    assert comparable(into["optimizer"]["state"]) == comparable(tree["optimizer"]["state"])
    assert into["epoch"] == 3


def save_sharded(rank: int, world_size: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    rows = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(14).view(2, 7), mesh, [Shard(1)])
    torch_checkpoint.save({"model": {"rows": rows, "columns": columns}, "n": 3}, checkpoint_id=folder)


def test_tensors_of_several_workers_become_whole(tmp_path: Path) -> None:
    run_workers(save_sharded, 2, str(tmp_path / "a"))
    found = tree_of_state(open_state(tmp_path / "a", Asked()))
    expected = {"model": {"rows": torch.arange(15.0).view(5, 3), "columns": torch.arange(14).view(2, 7)}, "n": 3}
    assert comparable(found) == comparable(expected)
    assert len(list((tmp_path / "a").glob("*.distcp"))) == 2


def test_optimizers_by_name_keep_their_names(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.Adam([*model.parameters()][::-1])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    named, states = get_state_dict(model, optimizer)
    state = open_state(save({"model": named, "optimizer": states}, tmp_path / "a"), Asked())
    assert (state.groups("optimizer") or [])[0]["params"] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    assert comparable(state.read("optimizer/0.weight/exp_avg")) == comparable(states["state"]["0.weight"]["exp_avg"])


def test_what_the_format_cannot_say_is_noted(tmp_path: Path) -> None:
    state = state_of_tree({"model": {"w": torch.ones(1)}, "milestones": {"at": {3: 1}}}, "x", "a tree", None)
    write_dcp(state, tmp_path / "a")
    assert state.notes == ["torch.distributed.checkpoint makes texts of keys that are none: ['milestones']['at'][3]"]
    assert tree_of_state(open_state(tmp_path / "a", Asked()))["milestones"] == {"at": {"3": 1}}
    clash = state_of_tree({"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}, "x", "a tree", None)
    with pytest.raises(CheckpointError, match=r"duplicated flatten key a\.b\.c"):
        write_dcp(clash, tmp_path / "b")


class Runs:
    """Pickles as a call of os.system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    "place", ["whole", "planner_data", "storage_data", "state_dict_metadata", "properties", "size"]
)
def test_metadata_that_would_run_code_is_refused(place: str, tmp_path: Path) -> None:
    folder, marker = save(many_entries(), tmp_path / "a"), tmp_path / "marker"
    found: Any = metadata(folder)
    if place == "whole":
        found = Runs(marker)
    elif place in ("properties", "size"):
        entry = next(one for one in found.state_dict_metadata.values() if isinstance(one, TensorStorageMetadata))
        setattr(entry, place, Runs(marker))
    else:
        getattr(found, place)["more"] = Runs(marker)
    changed(folder, found)
    with pytest.raises(
        CheckpointError, match=r"\.metadata is a pickle with the name \w+\.system.*Nothing of it was run"
    ):
        open_state(folder, Asked())
    assert not marker.exists()


def test_payloads_that_would_run_code_are_refused(tmp_path: Path) -> None:
    folder = save({"w": torch.ones(2), "x": Runs(tmp_path / "marker")}, tmp_path / "a")
    with pytest.raises(CheckpointError, match="'x' cannot be read without running code"):
        open_state(folder, Asked())
    assert not (tmp_path / "marker").exists()


def first_chunk(found: Metadata) -> Any:
    return next(one for name, one in found.state_dict_metadata.items() if name == "model.0.weight")


def first_info(found: Metadata) -> Any:
    return next(info for place, info in found.storage_data.items() if place.fqn == "model.0.weight")


def last_info(found: Metadata) -> Any:
    return max(found.storage_data.values(), key=lambda info: info.offset)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda m: first_chunk(m).chunks.clear(), "some parts of 'model.0.weight'"),
        (lambda m: setattr(first_chunk(m).chunks[0], "sizes", torch.Size([9, 9, 9, 9])), "lies outside"),
        (
            lambda m: setattr(first_chunk(m).chunks[0], "offsets", torch.Size([1, 0, 0, 0])),
            "no metadata of this format",
        ),
        (lambda m: setattr(first_chunk(m).properties, "dtype", torch.complex128), "complex128"),
        (lambda m: setattr(first_info(m), "relative_path", "../a/__0_0.distcp"), "is no file of the folder"),
        (lambda m: setattr(first_info(m), "offset", -1), "bytes of a file are wrong"),
        (lambda m: setattr(first_info(m), "transform_descriptors", ["zstd"]), r"\['zstd'\], such as compression"),
        (lambda m: m.storage_data.clear(), "no metadata of this format"),
        (lambda m: m.planner_data.update({"model.0.weight": "model"}), "the path 'model'"),
        (lambda m: m.planner_data.update({"epoch": ("model",)}), "value|twice"),
        (lambda m: m.planner_data.update({"model.0.weight": ("epoch", "x")}), "value|twice"),
        (lambda m: m.planner_data.update({"epoch": ("n", 10**9)}), "its lists have 1000000002 places"),
        (lambda m: setattr(first_info(m), "length", 10**9), "stand for several entries"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(change: Any, rule: str, tmp_path: Path) -> None:
    folder = save(many_entries(), tmp_path / "a")
    found = metadata(folder)
    change(found)
    with pytest.raises(CheckpointError, match=rule):
        open_state(changed(folder, found), Asked())


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda m: setattr(first_chunk(m).properties, "dtype", torch.int32), r"is not the int32"),
        (lambda m: setattr(last_info(m), "length", 10**9), "was cut off"),
        (lambda m: setattr(last_info(m), "offset", last_info(m).offset + 3), "or is damaged|was cut off"),
        (lambda m: setattr(first_info(m), "relative_path", "__7_0.distcp"), "__7_0.distcp is missing"),
    ],
)
def test_payloads_that_are_not_what_the_metadata_says_are_refused(change: Any, rule: str, tmp_path: Path) -> None:
    folder = save(many_entries(), tmp_path / "a")
    found = metadata(folder)
    change(found)
    try:
        wrong = open_state(changed(folder, found), Asked()).damage()
    except CheckpointError as error:  # a value is read at once
        wrong = [f"{error}"]
    assert re.search(rule, "\n".join(wrong))


def test_a_folder_without_metadata_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\.metadata: No such file"):
        open_state(tmp_path, Asked())
