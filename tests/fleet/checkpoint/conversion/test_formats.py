"""A file is read by what is in it, and what is none of the known formats is refused with what was looked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fleet.checkpoint.conversion.formats import open_state
from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.conversion.whole_state import write_fleet
from fleet.checkpoint.paddle_files.paddle_state import paddle_state
from fleet.checkpoint.readers.dcp import write_dcp
from fleet.checkpoint.readers.hugging_face import write_hugging_face
from fleet.checkpoint.readers.torch_file import write_torch
from fleet.errors import CheckpointError
from tests.helpers.many_tensors import comparable
from tests.helpers.sources import ROOT

TREE = {"model": {"w": torch.arange(4.0), "b": torch.ones(2, 2)}, "epoch": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns a folder with the same state in every format, under names that say nothing."""
    state = state_of_tree(TREE, "x", "a tree", None)
    write_fleet(state, str(tmp_path / "fleet"))
    write_torch(state, tmp_path / "torch")
    write_dcp(state, tmp_path / "dcp")
    write_hugging_face(state.only("model"), tmp_path / "one.safetensors")
    (tmp_path / "one.safetensors").rename(tmp_path / "one")
    write_hugging_face(state.only("model"), tmp_path / "folder")
    write_hugging_face(state.only("model"), tmp_path / "shards", 16)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("fleet", "a Fleet checkpoint"), ("torch", "a file of torch.save"), ("one", "safetensors"),
        ("dcp", "a checkpoint of torch.distributed.checkpoint"), ("folder", "safetensors"),
        ("shards", "safetensors, 2 files"), ("shards/model.safetensors.index.json", "safetensors, 2 files"),
    ],
)  # fmt: skip
def test_each_format_is_recognised_by_what_is_in_it(name: str, kind: str, folder: Path) -> None:
    state = open_state(str(folder / name))
    assert state.kind == kind
    assert comparable(tree_of_state(state.only("model"))) == comparable(TREE["model"])
    assert open_state(f"file://{folder}/{name}").kind == kind
    state = open_state(str(folder / name), "model", {"weight": "w"})
    assert sorted(tree_of_state(state)) == ["b", "weight"]


def test_what_is_unknown_is_refused_with_what_was_looked_for(folder: Path) -> None:
    (folder / "text").write_text("hello")
    (folder / "empty").mkdir()
    for name in ("text", "empty"):
        with pytest.raises(
            CheckpointError, match=r"no checkpoint that is known here.*index\.json.*\.metadata.*torch\.save"
        ):
            open_state(str(folder / name))
    with pytest.raises(CheckpointError, match="absent does not exist"):
        open_state(str(folder / "absent"))
    with pytest.raises(CheckpointError, match=r"Did you mean .*/shards\?"):
        open_state(str(folder))


def test_a_file_that_was_cut_off_is_called_so(folder: Path) -> None:
    data = (folder / "torch").read_bytes()
    (folder / "torch").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="begins as a file of torch.save and was cut off"):
        open_state(str(folder / "torch"))


def test_a_key_is_taken_or_given(folder: Path) -> None:
    assert open_state(str(folder / "one"), "net").keys() == ["net"]
    with pytest.raises(CheckpointError, match="no such entry"):
        open_state(str(folder / "torch"), "net")
    with pytest.raises(CheckpointError, match="--key: 'a/b' cannot be an entry"):
        open_state(str(folder / "one"), "a/b")


def test_paddles_files_go_to_their_readers(tmp_path: Path) -> None:
    path = ROOT / "tests/data/paddle_checkpoint/3.3.1/adam.pdparams"
    theirs = paddle_state(path)
    state = open_state(str(path))
    assert state.kind == "a Paddle file"
    assert comparable(tree_of_state(state)) == comparable(theirs)
    name = next(iter(theirs))
    renamed = open_state(str(path), "net", {"other": name})
    assert list(renamed.tensors) == ["net/other"]
    with pytest.raises(CheckpointError, match=r"paddle_optimizer_state\(\)"):
        open_state(str(path.with_suffix(".pdopt")))
    (tmp_path / "000").mkdir()
    (tmp_path / "000" / "part-000-00000").touch()
    with pytest.raises(CheckpointError, match=r"load_paddle_table\(\)"):
        open_state(str(tmp_path))
