"""A file is read by what is in it, and what is none of the known formats is refused with what was looked for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fleet.__main__ import main
from fleet.checkpoint import readers
from fleet.checkpoint.conversion.formats import known_formats, open_state
from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.readers.dcp import write_state as write_dcp
from fleet.checkpoint.readers.fleet_folder import write_state as write_fleet
from fleet.checkpoint.readers.hugging_face import write_state as write_hugging_face
from fleet.checkpoint.readers.torch_file import write_state as write_torch
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


TEN_LINES = """
from fleet.checkpoint.conversion.formats import Asked, Format
from fleet.checkpoint.conversion.torch_tree import state_of_tree
from pathlib import Path
import torch
FORMAT = Format(order=45, title="files of commas", file="a .commas file", to="commas", suffixes=(".commas",))
def recognises(path):
    return path.endswith(".commas")
def open_state(path, asked):
    numbers = [float(n) for n in Path(path).read_text().split(",")]
    return state_of_tree({"w": torch.tensor(numbers)}, path, "commas", asked.key)
def write_state(state, target):
    Path(target).write_text(",".join(f"{n}" for name in state.tensors for n in state.read(name).flatten().tolist()))
"""


def test_a_new_module_is_all_that_a_new_format_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "commas_file.py").write_text(TEN_LINES)
    monkeypatch.setattr(readers, "__path__", [*readers.__path__, str(tmp_path / "more")])
    assert main(["checkpoint", "--help"]) == 0
    assert "files of commas" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "a.commas").write_text("1,2,3")
    for source, target in (("a.commas", "b.pt"), ("b.pt", "c.commas"), ("c.commas", "d"), ("d", "e.safetensors")):
        assert main(["checkpoint", "convert", f"{tmp_path / source}", f"{tmp_path / target}"]) == 0
    assert "from a Fleet checkpoint" in capsys.readouterr().out
    state = open_state(str(tmp_path / "e.safetensors"))
    assert torch.equal(state.read("model/w"), torch.tensor([1.0, 2.0, 3.0]))
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match="a .commas file"):
        open_state(str(tmp_path / "text"))
    monkeypatch.delitem(sys.modules, "fleet.checkpoint.readers.commas_file")


def test_formats_are_tried_in_their_order_and_each_has_its_own() -> None:
    orders = [one.order for one in known_formats()]
    assert orders == sorted(set(orders))
    assert known_formats()[0].to == "fleet", "what is written without --to"


def test_the_declared_data_is_the_modules_own() -> None:
    for one in known_formats():
        assert replace(one.load().FORMAT, module=one.module) == one


def test_a_module_without_a_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stray.py").write_text("x = 1\n")
    monkeypatch.setattr(readers, "__path__", [str(tmp_path)])
    with pytest.raises(TypeError, match=r"stray\.py lacks FORMAT"):
        known_formats()


@pytest.mark.parametrize("page", ["docs/guides/checkpoint.md", "docs/guides/checkpoint.zh-CN.md"])
def test_the_page_has_a_row_for_each_target(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[2].strip() for line in lines if "| `" in line]
    assert {f"`{one.to}`" for one in known_formats() if one.to} <= set(rows)
