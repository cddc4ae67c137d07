"""Files of torch.save come back bit for bit, and nothing in them is run."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.checkpoint.readers.torch_file import is_torch_file, load_plain, torch_state
from fleet.checkpoint.readers.torch_file import write_state as write_torch
from fleet.errors import CheckpointError, ConfigError
from tests.helpers.many_tensors import comparable, many_entries, many_tensors


@pytest.mark.parametrize("tree", [many_tensors(), many_entries()], ids=["state_dict", "entries"])
@pytest.mark.parametrize("is_new", [True, False], ids=["zip", "before torch 1.6"])
def test_a_file_comes_back_bit_for_bit(tree: Any, is_new: bool, tmp_path: Path) -> None:
    if not is_new and "of_type.float32" in tree:
        tree = {name: value for name, value in tree.items() if value.dtype == torch.float32}
    torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=is_new)
    assert is_torch_file(tmp_path / "a.pt")
    state = torch_state(tmp_path / "a.pt")
    write_torch(state, tmp_path / "b.pt")
    assert comparable(torch.load(tmp_path / "b.pt", weights_only=True)) == comparable(tree)


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    torch.save(many_tensors(), tmp_path / "a.pt")
    state = torch_state(tmp_path / "a.pt", "net")
    assert state.aliases == {"net/tied.second": "net/tied.first"}
    write_torch(state, tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert found["tied.first"].data_ptr() == found["tied.second"].data_ptr()
    assert (tmp_path / "b.pt").stat().st_size <= (tmp_path / "a.pt").stat().st_size + 4096


def test_an_optimizer_that_was_written_continues_as_the_one_that_was_read(tmp_path: Path) -> None:
    entries = many_entries()
    torch.save(entries, tmp_path / "a.pt")
    write_torch(torch_state(tmp_path / "a.pt"), tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.BatchNorm2d(2))
    model.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(model.named_parameters())
    optimizer.load_state_dict(found["optimizer"])
    assert comparable(optimizer.state_dict()) == comparable(entries["optimizer"])


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_file_that_would_run_code_is_refused(is_new: bool, tmp_path: Path) -> None:
    torch.save(
        {"w": torch.ones(1), "x": Runs(tmp_path / "marker")}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_new
    )
    with pytest.raises(CheckpointError, match="cannot be read without running code from it: it holds an object of .*"):
        torch_state(tmp_path / "a.pt")
    assert not (tmp_path / "marker").exists()


def test_what_is_cut_off_or_no_state_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(many_tensors(), path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="or is damaged"):
        load_plain(path, "a.pt")
    for value, word in (
        ([torch.ones(1)], "a list"),
        (torch.ones(1), "a Tensor"),
        ({}, "a dict"),
        ({3: torch.ones(1)}, "a dict"),
    ):
        torch.save(value, path)
        with pytest.raises(CheckpointError, match=f"holds {word}, not a state"):
            torch_state(path)


def test_parts_that_are_compressed_are_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(10**6)}, tmp_path / "a.pt")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as archive,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    with pytest.raises(CheckpointError, match="b.pt"):
        torch_state(tmp_path / "b.pt")


def test_tensors_that_no_format_holds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for value in (torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128)):
        torch.save(OrderedDict(w=value, v=torch.ones(1)), path)
        with pytest.raises(CheckpointError, match="w"):
            torch_state(path)
        torch.save({"model": {"w": torch.ones(1)}, "more": [value]}, path)
        with pytest.raises((CheckpointError, ConfigError), match="more"):
            torch_state(path)


def test_tensors_without_data_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1), "v": torch.ones(2, device="meta")}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="'model/v' has no data"):
        torch_state(tmp_path / "a.pt")


def test_sums_are_compared_where_the_file_has_them(tmp_path: Path) -> None:
    tree = {"w": torch.arange(100.0), "v": torch.ones(3)}
    sums = torch.serialization.get_crc32_options()
    for has_sums in (True, False):
        path = tmp_path / f"{has_sums}.pt"
        torch.serialization.set_crc32_options(has_sums)
        torch.save(tree, path)
        torch.serialization.set_crc32_options(sums)
        assert torch_state(path).damage() == []
        assert (torch_state(path).damage_of_files is not None) == has_sums
        assert torch.equal(torch_state(path).read("model/w"), tree["w"])
    path = tmp_path / "True.pt"
    path.write_bytes(path.read_bytes().replace(torch.tensor(50.0).numpy().tobytes(), b"\1\2\3\4"))
    (wrong,) = torch_state(path).damage()
    assert "/data/0" in wrong
    state = torch_state(path)
    with pytest.raises(CheckpointError, match="was damaged after it was written"):
        state.read("model/v")
    state = torch_state(path)
    path.rename(tmp_path / "kept.pt")
    path.write_bytes(b"another")
    assert ["its list of parts" in one for one in state.damage()] == [True]


def test_other_files_are_not_taken_for_torchs(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"PK\x03\x04 nothing")
    assert not is_torch_file(tmp_path / "a")
    (tmp_path / "a").write_bytes(b"")
    assert not is_torch_file(tmp_path / "a")
