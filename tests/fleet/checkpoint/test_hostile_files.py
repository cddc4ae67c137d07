"""Small files that mean far more than they hold, or are built wrongly, are refused with the reason, and soon."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import fleet.checkpoint
from fleet.__main__ import main
from fleet.checkpoint import read_paddle
from fleet.checkpoint.conversion.formats import open_state
from fleet.errors import CheckpointError, ConfigError

START = b"\x80\x04"


def text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def name(module: str, kind: str) -> bytes:
    return text(module) + text(kind) + b"\x93"


def nested(tail: bytes) -> bytes:
    """Returns a pickle with forty tuples, each of which holds the one before twice."""
    program = START + text("a") + b"\x94"
    for number in range(40):
        program += (b"h" + bytes([number])) * 2 + b"\x86\x94"
    return program + tail + b"."


def doubled_text() -> bytes:
    program = START + text("a" * 200) + b"\x94"
    for number in range(40):
        program += name("pathlib", "PosixPath") + (b"h" + bytes([number])) * 2 + b"\x86R\x94"
    return program + b"."


METADATA = {
    "a text that doubles": doubled_text(),
    "a name of nested tuples": nested(text("x") + b"\x93"),
    "a shape of nested tuples": nested(name("torch", "Size") + b"h\x28\x85R"),
    "a value of nested tuples": nested(b"h\x28"),
}


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch") / "good"
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({"w": torch.randn(8, 8), "list": [torch.zeros(1), 3]}, checkpoint_id=folder)
    return folder


@pytest.fixture
def copied(of_torch: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(of_torch, tmp_path / "x"))


@pytest.mark.parametrize("case", METADATA)
def test_metadata_of_torch_that_means_more_than_it_holds(copied: Path, case: str) -> None:
    assert open_state(f"{copied}").tensors
    (copied / ".metadata").write_bytes(METADATA[case])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        open_state(f"{copied}")


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_data_file_of_torch_that_is_no_file(copied: Path, kind: str) -> None:
    data = next(copied.glob("*.distcp"))
    data.rename(copied.parent / "outside")
    os.mkfifo(data) if kind == "fifo" else data.symlink_to(copied.parent / "outside")
    with pytest.raises(CheckpointError, match="a symbolic link, which may lead anywhere|not a regular file"):
        open_state(f"{copied}")


def test_boxes_of_torch_with_the_same_bytes_or_too_few(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    def changed(change: Callable[[Any], None]) -> None:
        found = FileSystemReader(copied).read_metadata()
        change(found)
        import pickle

        (copied / ".metadata").write_bytes(pickle.dumps(found))

    def all_at_one_place(found: Any) -> None:
        for place in found.storage_data.values():
            place.offset = 0

    def too_large(found: Any) -> None:
        entry = found.state_dict_metadata["w"]
        entry.size = entry.chunks[0].sizes = torch.Size([1 << 20, 1 << 20])

    def far_in_a_list(found: Any) -> None:
        found.planner_data["list.0"] = ("list", 900_000_000)

    changed(lambda found: None)
    assert open_state(f"{copied}").tensors
    for change, rule in (
        (far_in_a_list, "its lists have 900000001 places"),
        (too_large, "more numbers than its [0-9]+ bytes hold"),
        (all_at_one_place, "stand for several entries"),
    ):
        changed(change)
        with pytest.raises(CheckpointError, match=rule):
            open_state(f"{copied}")


def test_a_file_of_torch_that_would_unfold(tmp_path: Path) -> None:
    path = f"{tmp_path / 'x.pt'}"
    shared: Any = [1]
    torch.save({"w": torch.zeros(4).expand(1000, 4), "x": [shared, shared]}, path)
    assert open_state(path).read("model/w").shape == (1000, 4)
    torch.save({"w": torch.zeros(1).expand(300_000_000)}, path)
    with pytest.raises(CheckpointError, match=r"'model/w' is \[300000000\], in which the same numbers stand again"):
        open_state(path)
    assert main(["checkpoint", "verify", path]) == 1
    for _ in range(40):
        shared = [shared, shared]
    torch.save({"w": torch.zeros(2), "x": shared}, path)
    with pytest.raises(CheckpointError, match="name the same values again and again"):
        open_state(path)


def paddle(array: bytes, times: int) -> bytes:
    """Returns a file of Paddle with one array's bytes, and ``times`` arrays of them by columns."""
    dtype = (
        name("numpy", "dtype")
        + text("f4")
        + b"\x89\x88\x87R(K\x03"
        + text("<")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    )
    made = START + b"B" + struct.pack("<I", len(array)) + array + b"\x940" + dtype + b"\x940}"
    one = name("numpy.core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
    one += b"(K\x01" + b"J" + struct.pack("<i", len(array) // 8) + b"K\x02\x86h\x01\x88h\x00tb"
    return made + b"".join(text(f"w{number}") + one + b"s" for number in range(times)) + b"."


def test_a_file_of_paddle_whose_arrays_have_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.pdparams"
    array = np.arange(100_000, dtype=np.float32)
    path.write_bytes(paddle(array.tobytes(), 2))
    assert read_paddle(path)["w1"][1, 0] == 1
    path.write_bytes(paddle(array.tobytes(), 60))
    with pytest.raises(CheckpointError, match="the same bytes again and again, and would be far larger than the file"):
        read_paddle(path)
    path.write_bytes(METADATA["a name of nested tuples"])
    with pytest.raises(CheckpointError, match="a name that is a str of a tuple"):
        open_state(f"{path}")


Change = Callable[[dict[str, Any]], None]


def value(found: Any) -> Change:
    return lambda index: index["values"].__setitem__("epoch", found)


def tensor(**found: Any) -> Change:
    return lambda index: index["tensors"]["w"].update(found)


def overlapping(index: dict[str, Any]) -> None:
    ((file, begin, _, _),) = index["tensors"]["w"]["pieces"]
    index["tensors"]["w"] = {
        "dtype": "float32",
        "shape": [4, 4],
        "pieces": [[file, begin, [0, row], [4, 1]] for row in range(4)],
    }


FORGED: dict[str, tuple[Change, str]] = {
    "the name of an array is a list": (value({"$": "array", "name": [1]}), r"'epoch' names the tensor \[1\]"),
    "an array that is missing": (value({"$": "array", "name": "v"}), "'epoch' names the tensor 'v', which is missing"),
    "a value that is too deep": (value(json.loads("[" * 900 + "]" * 900)), "'epoch': values lie more than 100 deep"),
    "a shape that no tensor has": (tensor(shape=[0, 2**62, 8], pieces=[]), "which no tensor has"),
    "a shape of many dimensions": (tensor(shape=[1] * 65, pieces=[]), "which no tensor has"),
    "pieces of the same bytes": (overlapping, "stands for 'w' and for another piece"),
    "a complex number of three": (value({"$": "complex", "items": [1, 2, 3]}), "a value is damaged"),
    "a type that is none": (value({"$": "dtype", "name": "os"}), "torch.os is no dtype"),
    "no kinds": (lambda index: index["values"].__setitem__("#objects", [1]), "'#objects' does not say"),
    "no groups": (lambda index: index["values"].__setitem__("opt/groups@0", [{"params": 1}]), "are no groups"),
    "no job": (lambda index: index["job"].__setitem__("degrees", {"dp": "x"}), "does not describe a job"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_index_is_refused_and_verify_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    path = tmp_path / "x"
    fleet.checkpoint.save(path, {"w": torch.zeros(4, 4), "epoch": 3})
    assert main(["checkpoint", "verify", f"{path}"]) == 0
    index = json.loads((path / "index.json").read_text())
    del index["sha256"]
    change, rule = FORGED[case]
    change(index)
    index["sha256"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rule):
        fleet.checkpoint.load(path)
    assert main(["checkpoint", "verify", f"{path}"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_boxes_that_cover_each_other_take_no_time(tmp_path: Path) -> None:
    """Boxes of one number along the diagonal, inside a whole of as many cells as edges to the fourth."""
    path, edge = tmp_path / "x", 64
    fleet.checkpoint.save(path, {"w": torch.zeros(2)})
    index = json.loads((path / "index.json").read_text())
    del index["sha256"]
    size = edge**4 + edge
    (path / "big").write_bytes(bytes(size))
    sums = [zlib.crc32(bytes(min(1 << 20, size - at))) for at in range(0, size, 1 << 20)]
    index["files"]["big"] = {"bytes": size, "crc32": sums}
    pieces = [["big", 0, [0] * 4, [edge] * 4]] + [["big", edge**4 + i, [i] * 4, [1] * 4] for i in range(1, edge)]
    index["tensors"]["q"] = {"dtype": "int8", "shape": [edge] * 4, "pieces": pieces}
    index["sha256"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (path / "index.json").write_text(json.dumps(index))
    assert open_state(f"{path}").tensors["q"].shape == (edge,) * 4


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        ({"__metadata__": [1]}, "'__metadata__' is .1.; it holds texts"),
        ({"__metadata__": {"a": {"b": 1}}}, "it holds texts"),
        ({"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, r"has the type \['F32'\]"),
        ({"w": {"dtype": "F32", "shape": [0, 2**62, 8], "data_offsets": [0, 4]}}, "has the shape"),
    ],
)
def test_a_header_of_safetensors_that_is_built_wrongly(tmp_path: Path, header: dict[str, Any], rule: str) -> None:
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, **header}
    data = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(data)) + data + bytes(4))
    with pytest.raises(CheckpointError, match=rule):
        open_state(f"{tmp_path / 'x.safetensors'}")


def test_a_value_that_could_not_be_read_is_not_saved(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(120):
        deep = [deep]
    own: list[Any] = []
    own.append(own)
    for found in (deep, own):
        with pytest.raises(ConfigError, match="'v' is a value with more than 100 levels, or inside itself"):
            fleet.checkpoint.save(tmp_path / "x", {"v": found})
    assert not (tmp_path / "x").exists()
