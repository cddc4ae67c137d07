"""Safetensors files: the real package and transformers read what is written here, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from fleet.checkpoint.conversion.formats import Asked
from fleet.checkpoint.conversion.torch_tree import state_of_tree, tree_of_state
from fleet.checkpoint.conversion.whole_state import WholeState
from fleet.checkpoint.readers.hugging_face import WEIGHTS_INDEX, open_state, single_file
from fleet.checkpoint.readers.hugging_face import write_state as write_hugging_face
from fleet.errors import CheckpointError
from tests.helpers.many_tensors import bits, comparable, many_entries, many_tensors


def whole(tree: Any) -> WholeState:
    return state_of_tree(tree, "x", "a tree", None)


def untied() -> dict[str, torch.Tensor]:
    return {name: one for name, one in many_tensors().items() if name != "tied.second"}


@pytest.mark.parametrize("most", [None, 40, 200, 10**9])
def test_the_package_reads_every_shard(most: int | None, tmp_path: Path) -> None:
    target = tmp_path / ("one.safetensors" if most is None else "folder")
    write_hugging_face(whole(many_tensors()), target, most)
    files = sorted(target.glob("*.safetensors")) if most else [target]
    found = {name: one for file in files for name, one in safetensors.torch.load_file(file).items()}
    assert comparable(found) == comparable(untied())
    assert comparable(tree_of_state(open_state(target, Asked()))) == comparable(many_tensors())
    if most == 200:
        index = json.loads((target / WEIGHTS_INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(one.numel() * one.itemsize for one in untied().values())
        assert set(index["weight_map"]) == set(untied())
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        assert all(sum(one.nbytes for one in safetensors.torch.load_file(file).values()) <= 200 or
                   len(safetensors.torch.load_file(file)) == 1 for file in files)  # fmt: skip


def test_files_of_the_package_are_read(tmp_path: Path) -> None:
    state = {name: one.contiguous() for name, one in untied().items()}
    safetensors.torch.save_file(state, tmp_path / "a.safetensors", metadata={"origin": "elsewhere"})
    found = open_state(tmp_path / "a.safetensors", Asked("net"))
    assert {name: bits(found.read(f"net/{name}")) for name in state} == {name: bits(one) for name, one in state.items()}
    assert found.notes == ["left out: the text 'origin' of the metadata"]
    assert single_file(tmp_path) == tmp_path / "a.safetensors"


def test_shared_tensors_go_both_ways_as_the_package_names_them(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    safetensors.torch.save_model(model, tmp_path / "a.safetensors")
    found = open_state(tmp_path / "a.safetensors", Asked())
    assert len(found.aliases) == 1
    assert comparable(tree_of_state(found)) == comparable(dict(model.state_dict()))
    write_hugging_face(whole(model.state_dict()), tmp_path / "b.safetensors")
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    other[1].weight = other[0].weight
    assert safetensors.torch.load_model(other, tmp_path / "b.safetensors") == (set(), [])
    assert comparable(dict(other.state_dict())) == comparable(dict(model.state_dict()))


@pytest.mark.parametrize("most", [10**9, 5000])
def test_transformers_takes_a_tied_model(most: int, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=40, n_positions=8)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    write_hugging_face(whole(model.state_dict()), tmp_path / "gpt", most)
    config.save_pretrained(tmp_path / "gpt")
    loaded, report = GPT2LMHeadModel.from_pretrained(tmp_path / "gpt", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids = torch.arange(6).view(1, 6)
    assert torch.equal(loaded.eval()(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
    back = open_state(tmp_path / "theirs", Asked())
    own = model.state_dict()
    assert {n: bits(back.read(f"model/{n}")) for n in own if f"model/{n}" in back.tensors} == {
        name: bits(own[name]) for name in own if f"model/{name}" in back.tensors
    }
    assert set(own) - {name.removeprefix("model/") for name in back.tensors} <= {"lm_head.weight"}


def test_values_stay_behind_and_are_named(tmp_path: Path) -> None:
    state = whole({"model": {"w": torch.ones(1), "_extra_state": [torch.zeros(2), 3]}, "epoch": 3}).only("model")
    write_hugging_face(state, tmp_path / "a.safetensors")
    assert list(safetensors.torch.load_file(tmp_path / "a.safetensors")) == ["w"]
    assert state.notes == [
        "left out: epoch", "left out, because safetensors files hold tensors only: model/_extra_state",
    ]  # fmt: skip


def shards(folder: Path) -> Path:
    write_hugging_face(whole(many_entries()["model"]), folder, 50)
    return folder


def test_a_missing_or_a_wrong_shard_is_named(tmp_path: Path) -> None:
    folder = shards(tmp_path / "a")
    first = sorted(folder.glob("*.safetensors"))[0]
    index = json.loads((folder / WEIGHTS_INDEX).read_text())
    data = first.read_bytes()
    first.unlink()
    with pytest.raises(CheckpointError, match=f"{first.name}: No such file"):
        open_state(folder, Asked())
    first.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=f"{first.name} is no safetensors file"):
        open_state(folder, Asked())
    first.write_bytes(data + b"x")
    with pytest.raises(CheckpointError, match="bytes are used"):
        open_state(folder, Asked())
    first.write_bytes(data)
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], "gone": first.name}}))
    with pytest.raises(CheckpointError, match="'gone' lies in .*, which lacks it"):
        open_state(folder, Asked())
    (folder / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": {"0.weight": index["weight_map"]["0.weight"]}}))
    assert len(open_state(folder, Asked()).tensors) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}']
)
def test_an_index_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"no index of safetensors|no file beside it"):
        open_state(tmp_path, Asked())


def test_two_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        safetensors.torch.save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="holds 2 safetensors files and no"):
        open_state(tmp_path, Asked())


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ({"dtype": "F4"}, "has the type 'F4'"), ({"shape": [-4]}, "has the shape"), ({"shape": "4"}, "has the shape"),
        ({"shape": [5]}, "bytes of its type and shape"), ({"shape": [True, 4]}, "has the shape"),
        ({"data_offsets": [1, 5], "shape": [4]}, "bytes of its type and shape"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused(entry: dict[str, Any], rule: str, tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **entry}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(5))
    with pytest.raises(CheckpointError, match=rule):
        open_state(tmp_path / "a.safetensors", Asked())


def test_a_name_of_the_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="__metadata__"):
        write_hugging_face(whole({"__metadata__": torch.ones(1)}), tmp_path / "a.safetensors")
