"""This package's own checkpoints are read and written as whole states, one tensor at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor

from fleet.checkpoint.commit import Share, read_index, write_share
from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.conversion.whole_state import Described, WholeState, as_bytes
from fleet.checkpoint.data_files import FileBlock, in_file_order
from fleet.checkpoint.index import BLOCK_BYTES
from fleet.checkpoint.readers.fleet_folder import fleet_state
from fleet.checkpoint.readers.fleet_folder import write_state as write_fleet
from fleet.checkpoint.readers.hugging_face import write_state as write_hugging_face
from fleet.checkpoint.storage import LocalFolder, open_folder
from fleet.errors import CheckpointError
from tests.helpers.many_tensors import bits, comparable, many_entries, many_tensors


def whole(tree: Any, key: str | None = None) -> WholeState:
    return state_of_tree(tree, "x", "a tree", key)


def written(tree: Any, path: str | Path) -> WholeState:
    write_fleet(whole(tree), str(path))
    folder = open_folder(path)
    return fleet_state(folder, read_index(folder))


@pytest.mark.parametrize("tree", [many_tensors(), many_entries()], ids=["state_dict", "entries"])
@pytest.mark.parametrize("path", ["local", "memory://whole-state/run"])
def test_a_checkpoint_comes_back_bit_for_bit(tree: Any, path: str, tmp_path: Path) -> None:
    state = written(tree, tmp_path / path if path == "local" else path)
    expected = {"model": tree} if "of_type.float32" in tree else tree
    assert comparable(tree_of_state(state)) == comparable(expected)
    assert state.damage() == []
    fsspec.filesystem("memory").store.clear()


def test_kinds_and_second_names_are_kept(tmp_path: Path) -> None:
    state = written(many_tensors(), tmp_path / "a")
    assert state.kinds == {"model": ["module", ""]}
    assert state.aliases == {"model/tied.second": "model/tied.first"}


def test_a_view_that_is_not_resolved_is_written_as_its_numbers(tmp_path: Path) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj()
    assert tensor.is_conj()
    assert torch.equal(written({"w": tensor}, tmp_path / "a").read("model/w"), tensor)


def test_a_tensor_in_overlapping_pieces_of_two_workers_becomes_whole(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    folder.prepare()
    numbers = torch.arange(24.0).view(4, 6).to(torch.bfloat16)
    boxes = {1: ((0, 2), (4, 4)), 0: ((0, 0), (4, 3))}
    for rank, (offsets, sizes) in boxes.items():
        part = numbers[:, offsets[1] : offsets[1] + sizes[1]]
        block = FileBlock("model/w", "bfloat16", (4, 6), offsets, sizes)
        write_share(folder, Share("ab", rank, 2, in_file_order([block])), [as_bytes(part)])
    state = fleet_state(folder, read_index(folder))
    assert state.pieces == {"model/w": 2}
    assert bits(state.read("model/w")) == bits(numbers)


def test_a_workers_own_state_stays_behind(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    blocks = [
        FileBlock("@0/optimizer/w/m", "float32", (1,), (0,), (1,)),
        FileBlock("model/w", "float32", (1,), (0,), (1,)),
    ]
    write_share(folder, Share("ab", 0, 1, blocks, {"@0/optimizer/groups@0": []}), [bytes(4)] * 2)
    state = fleet_state(folder, read_index(folder))
    assert (list(state.tensors), state.values) == (["model/w"], {})
    assert state.notes == ["left out: each worker's own state (2 entries)"]


def test_damage_is_found_in_every_file_also_between_tensors(tmp_path: Path) -> None:
    state = written({"a": torch.arange(BLOCK_BYTES), "b": torch.ones(3)}, tmp_path / "run")
    (path,) = (tmp_path / "run").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[3 * BLOCK_BYTES] ^= 1
    path.write_bytes(data)
    assert len(state.damage()) == 1
    assert "do not match their sum" in state.damage()[0]
    with pytest.raises(CheckpointError, match="do not match their sum"):
        state.read("model/a")
    assert torch.equal(state.read("model/b"), torch.ones(3))
    path.unlink()
    folder = LocalFolder(tmp_path / "run")
    assert "No such file" in fleet_state(folder, read_index(folder)).damage()[0]


def test_a_value_whose_tensor_is_missing_is_found(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write_share(folder, Share("ab", 0, 1, [], {"rng": {"$": "tensor", "name": "rng"}}), [])
    with pytest.raises(CheckpointError, match="'rng' names the tensor 'rng', which is missing"):
        read_index(folder)


def test_a_failed_write_leaves_no_folder(tmp_path: Path) -> None:
    def fails(name: str) -> Tensor:
        raise CheckpointError("shard 3 is missing")

    state = whole(many_tensors())
    state.read = fails
    with pytest.raises(CheckpointError, match="shard 3 is missing"):
        write_fleet(state, str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["fleet", "hf", "shards"])
def test_one_tensor_at_a_time_is_in_memory(to: str, tmp_path: Path) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def make(name: str) -> Tensor:
        nonlocal most
        most = max(most, len(alive) + 1)
        made = torch.ones(100)
        alive.add(made)
        return made

    state = WholeState("x", "made", {f"model/{n}": Described("float32", (100,)) for n in range(20)}, make, is_bare=True)
    if to == "fleet":
        write_fleet(state, str(tmp_path / "run"))
    else:
        write_hugging_face(state, tmp_path / "run", 1000 if to == "shards" else None)
    assert most <= 2  # the one that is written, and the next
