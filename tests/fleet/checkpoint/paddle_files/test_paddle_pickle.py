"""Files of paddle.save: every recorded one, every form, and crafted ones, of which nothing may run."""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleet.checkpoint.paddle_files.paddle_pickle import read_paddle
from fleet.errors import CheckpointError
from tests.helpers.paddle_files import RECORDED

FILES = sorted(path for path in RECORDED.glob("*/*.pd*"))
HEAD = b"\x80\x02"


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.pdparams"
    path.write_bytes(data)
    return path


def equal(found: Any, wanted: Any) -> None:
    """Compares what was read with what Python's own pickle reads of a file that we wrote ourselves."""
    if isinstance(wanted, dict):
        hidden = {"StructuredToParameterName@@", "UnpackBigParamInfor@@"}
        assert list(found) == [key for key in wanted if key not in hidden]
        for key in found:
            equal(found[key], wanted[key])
    elif isinstance(wanted, np.ndarray):
        if wanted.dtype == np.uint16:
            assert found.dtype == torch.bfloat16
            found, wanted = found.view(torch.int16), wanted.view(np.int16)
        assert found.dtype == torch.from_numpy(np.zeros(1, wanted.dtype)).dtype
        assert found.shape == wanted.shape
        np.testing.assert_array_equal(found.numpy(), wanted)
    elif isinstance(wanted, tuple) and len(wanted) == 2 and isinstance(wanted[1], np.ndarray):
        equal(found, wanted[1])
    else:
        assert found == wanted


class Recorded(pickle.Unpickler):
    """Python's machine, for files that stand in this repository."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(module.replace("numpy._core", "numpy.core"), name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_reads_what_paddle_wrote(path: Path) -> None:
    wanted = Recorded(io.BytesIO(path.read_bytes())).load()
    found = read_paddle(path)
    equal(found, wanted)
    called = {key: value[0] for key, value in wanted.items() if isinstance(value, tuple)}
    assert found.parameter_names == wanted.get("StructuredToParameterName@@", called)


def test_names_and_forms_of_the_recorded_files() -> None:
    """Both forms with a call are among them, and the first tells parameters' own names."""
    one = read_paddle(RECORDED / "2.6.2" / "one_file.pd")
    assert b"eval" in (RECORDED / "2.6.2" / "static_nested.pd").read_bytes()
    assert b"tuple" in (RECORDED / "2.6.2" / "one_file.pd").read_bytes()
    assert (one["epoch"], one["note"]) == (3, "mixed")
    assert set(one["model"].parameter_names) == set(one["model"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert read_paddle(RECORDED / "2.6.2" / "one_file.pd", "model").keys() == one["model"].keys()
    with pytest.raises(CheckpointError, match=r"under 'net'.*'model', 'optimizer'"):
        read_paddle(RECORDED / "2.6.2" / "one_file.pd", "net")


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_every_dtype_and_shape(protocol: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    arrays: dict[str, Any] = {
        code: (draw.normal(size=(3, 5)) * 50).astype(code)
        for code in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "f2", "f4", "f8", "c8", "c16")
    }
    arrays |= {"empty": np.zeros((0, 3), "f4"), "one": np.array(2.5, "f4"), "columns": np.asfortranarray(arrays["f4"])}
    arrays |= {"long": draw.normal(size=(40, 50)).astype("f4"), "by columns": np.ones((30, 50, 7), order="F").cumsum(2)}
    values = {"scalar": np.float32(0.1), "number": np.int64(-3), "list": [1, 2.5, None, True, "a", (1, 2)], 3: b"x"}
    state = collections.OrderedDict(arrays) | values
    path = written(tmp_path, pickle.dumps(state, protocol))
    found = read_paddle(path)
    equal(found, dict(state))
    found["long"][0] = 1.0  # the memory is this process's own
    assert path.read_bytes() == pickle.dumps(state, protocol)


def test_slices_of_large_arrays(tmp_path: Path) -> None:
    """Protocols 2 and 3: Paddle slices arrays of 1 GiB; the form is the same for small ones."""
    whole = np.arange(24, dtype="f4").reshape(4, 6)
    state: dict[str, Any] = {"a": np.ones(2, "f4")}
    state |= {f"w@@.{n}": part for n, part in enumerate(np.split(whole.reshape(-1), [10, 20]))}
    slices = {"w": {"OriginShape": (4, 6), "slices": ["w@@.0", "w@@.1", "w@@.2"]}}
    found = read_paddle(written(tmp_path, pickle.dumps(state | {"UnpackBigParamInfor@@": slices}, 2)))
    assert list(found) == ["a", "w"]
    np.testing.assert_array_equal(found["w"].numpy(), whole)
    slice_lists: list[Any] = [["w@@.0"], ["w@@.0", "w@@.1", "none"], [], "w@@.0", [["w@@.0"]]]
    for wrong in [{"w": {"OriginShape": (4, 6), "slices": names}} for names in slice_lists] + [{"w": 1}, [1], {"a": 2}]:
        with pytest.raises(CheckpointError, match="UnpackBigParamInfor@@"):
            read_paddle(written(tmp_path, pickle.dumps(state | {"UnpackBigParamInfor@@": wrong}, 2)))


def test_a_value_that_stands_twice_is_one(tmp_path: Path) -> None:
    array = np.ones(3, "f4")
    found = read_paddle(written(tmp_path, pickle.dumps({"a": array, "b": array, "c": [array]}, 4)))
    assert found["a"] is found["b"] is found["c"][0]


# ---- crafted files ---------------------------------------------------------------------------------------------------

RAN: list[str] = []


def ran(*arguments: Any) -> Any:
    RAN.append(repr(arguments))
    return {}


class Call:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments, state) if state is not None else (function, arguments)

    def __reduce__(self) -> Any:
        return self.parts


ARRAY = np.arange(3, dtype="f4")
RECONSTRUCT, _, ARRAY_STATE = ARRAY.__reduce__()
DTYPE = np.dtype("f4")


def array_of(state: Any) -> bytes:
    """Returns a pickle whose array has the given state."""
    return pickle.dumps({"w": Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=state)}, 4)


def dtype_of(*arguments: Any, state: Any = (3, "<", None, None, None, -1, -1, 0)) -> bytes:
    """Returns a pickle of an array with a dtype that was made this way."""
    return array_of((1, (3,), Call(np.dtype, *arguments, state=state), False, b"\0" * 12))


MARK = "ran-by-a-pickle"
CRAFTED: dict[str, bytes] = {
    "reduce os.system": pickle.dumps({"w": Call(os.system, f"touch {MARK}")}, 4),
    "reduce at the end": pickle.dumps(Call(os.system, f"touch {MARK}"), 2),
    "nested": pickle.dumps({"a": [{"b": (1, Call(ran, 1))}]}, 4),
    "inside an OrderedDict": pickle.dumps(collections.OrderedDict(a=Call(ran)), 2),
    "inside a name": pickle.dumps({"StructuredToParameterName@@": Call(ran)}, 4),
    "global": HEAD + b"}(X\x01\x00\x00\x00wcos\nsystem\nu.",
    "stack global of a dotted name": b"\x80\x04}\x8c\x01w\x8c\x08builtins\x8c\x0deval.__call__\x93s.",
    "inst": HEAD + f"(S'touch {MARK}'\nios\nsystem\n.".encode(),
    "obj": HEAD + f"(cos\nsystem\nS'touch {MARK}'\no.".encode(),
    "newobj": HEAD + b"cos\nsystem\n(tR\x81.",
    "newobj of ndarray": HEAD + b"cnumpy\nndarray\n(I3\nt\x81.",
    "newobj_ex": b"\x80\x04cos\nsystem\n)}\x92.",
    "ext1": HEAD + b"\x82\x01.",
    "ext2": HEAD + b"\x83\x01\x00.",
    "ext4": HEAD + b"\x84\x01\x00\x00\x00.",
    "persistent id": HEAD + b"Pnone\n.",
    "binary persistent id": HEAD + b"X\x01\x00\x00\x00wQ.",
    "buffer out of band": b"\x80\x04\x97.",
    "eval of a text": pickle.dumps({"w": Call(eval, f"open({MARK!r}, 'w')", {"data": ARRAY})}, 4),
    "eval without data": pickle.dumps({"w": Call(eval, "data")}, 4),
    "eval with more": pickle.dumps({"w": Call(eval, "data", {"data": ARRAY, "__builtins__": {}})}, 4),
    "eval of no array": pickle.dumps({"w": Call(eval, "data", {"data": [1]})}, 4),
    "getattr": pickle.dumps({"w": Call(getattr, ARRAY, "tofile")}, 4),
    "tuple of a list": pickle.dumps({"w": Call(tuple, [1, 2])}, 4),
    "tuple of nothing": pickle.dumps({"w": Call(tuple)}, 4),
    "bytes of a number": pickle.dumps({"w": Call(bytes, 1 << 40)}, 4),
    "codecs of rot13": HEAD + b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.",
    "OrderedDict of a text": pickle.dumps({"w": Call(collections.OrderedDict, "ab")}, 4),
    "build on a dict": HEAD + b"}}(X\x09\x00\x00\x00__class__cos\nsystem\nub.",
    "build on a plain dict": HEAD + b"}}X\x01\x00\x00\x00aK\x01sb.",
    "build on a function": HEAD + b"cbuiltins\neval\n}b.",
    "build on a list": HEAD + b"]}b.",
    "append to a dict": HEAD + b"}K\x01a.",
    "ndarray itself": pickle.dumps({"w": np.ndarray}, 4),
    "dtype itself": pickle.dumps({"w": np.dtype}, 4),
    "a dtype without an array": pickle.dumps({"w": np.dtype("f4")}, 4),
    "array of objects": pickle.dumps({"w": np.array([Call(ran)], dtype=object)}, 4),
    "array of numbers as objects": pickle.dumps({"w": np.array([1, 2], dtype=object)}, 4),
    "array of objects, empty": pickle.dumps({"w": np.array([], dtype=object)}, 4),
    "array of records": pickle.dumps({"w": np.zeros(3, [("a", "f4")])}, 4),
    "array of texts": pickle.dumps({"w": np.array(["a"])}, 4),
    "array of dates": pickle.dumps({"w": np.array(["2020-01-01"], "M8[D]")}, 4),
    "array of another class": pickle.dumps({"w": Call(RECONSTRUCT, dict, (0,), b"b", state=ARRAY_STATE)}, 4),
    "array of a huge shape": array_of((1, (1 << 40, 1 << 20), DTYPE, False, b"\0" * 12)),
    "array of an overflowing shape": array_of((1, (1 << 62, 4, 1 << 70), DTYPE, False, b"\0" * 12)),
    "array of a huge empty shape": array_of((1, (0, 1 << 70), DTYPE, False, b"")),
    "array of many dims": array_of((1, (1,) * 70, DTYPE, False, b"\0" * 4)),
    "array of a negative shape": array_of((1, (-3, -1), DTYPE, False, b"\0" * 12)),
    "array of a shape of texts": array_of((1, ("3",), DTYPE, False, b"\0" * 12)),
    "array of a list as shape": array_of((1, [3], DTYPE, False, b"\0" * 12)),
    "array of too few bytes": array_of((1, (4,), DTYPE, False, b"\0" * 12)),
    "array of no bytes": array_of((1, (3,), DTYPE, False, [1, 2, 3])),
    "array of a text": array_of((1, (3,), DTYPE, False, "abcabcabcabc")),
    "array of another version": array_of((9, (3,), DTYPE, False, b"\0" * 12)),
    "array of a dict as state": array_of({"shape": (3,)}),
    "array without state": pickle.dumps({"w": Call(RECONSTRUCT, np.ndarray, (0,), b"b")}, 4),
    "dtype of objects": dtype_of("O8"),
    "dtype of a class": dtype_of(Call(ran)),
    "dtype of records": dtype_of([("a", "O8")]),
    "dtype with a sub-array": dtype_of("f4", state=(3, "<", ("f4", (9,)), None, None, -1, -1, 0)),
    "dtype with fields": dtype_of("f4", state=(3, "<", None, ("a",), {"a": 1}, -1, -1, 0)),
    "dtype of high bytes first": dtype_of("f4", state=(3, ">", None, None, None, -1, -1, 0)),
    "dtype with a text as state": dtype_of("f4", state="<f4"),
    "scalar of objects": pickle.dumps({"w": Call(np.float32(1).__reduce__()[0], np.dtype("O"), ARRAY)}, 4),
    "scalar of many bytes": pickle.dumps({"w": Call(np.float32(1).__reduce__()[0], DTYPE, b"\0" * 400)}, 4),
    "scalar of nothing": pickle.dumps({"w": Call(np.float32(1).__reduce__()[0])}, 4),
    "key of a tuple": pickle.dumps({(1, 2): ARRAY}, 4),
    "a deep tuple as key": HEAD + b"})" + b"\x85" * 400_000 + b"K\x01s.",
    "a deep tuple as key of pairs": HEAD + b"ccollections\nOrderedDict\n(]](" + b")" + b"\x85" * 400_000 + b"NeatR.",
    "a deep tuple as shape": HEAD
    + b"}X\x01\x00\x00\x00wcnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n)K\x00tR"
    + b"(K\x01)"
    + b"\x85" * 100_000
    + b"NNNtbs.",
    "unhashable key": HEAD + b"}]K\x01s.",
    "a set": pickle.dumps({"w": {1, 2}}, 4),
    "a lock": pickle.dumps({"w": Call(threading.Lock)}, 4),
    "no dictionary": pickle.dumps([ARRAY], 4),
    "a number": pickle.dumps(3, 4),
    "a list inside itself": HEAD + b"}X\x01\x00\x00\x00w]q\x00h\x00as.",
    "a dictionary inside itself": HEAD + b"}q\x00X\x01\x00\x00\x00wh\x00s.",
    "deep lists": HEAD + b"}X\x01\x00\x00\x00w" + b"]" * 500 + b"a" * 499 + b"s.",
    "an empty stack": HEAD + b"R.",
    "a mark as value": HEAD + b"}X\x01\x00\x00\x00w(s.",
    "a claim of 2^60 bytes": b"\x80\x04}\x8c\x01w\x8e" + struct.pack("<Q", 1 << 60) + b"abc",
    "a claim of a long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc",
    "a claim of a long number": HEAD + b"\x8b" + struct.pack("<i", 1 << 30) + b"abc.",
    "a number of many digits": HEAD + b"I" + b"9" * 60_000 + b"\n.",
    "a line without an end": HEAD + b"c" + b"a" * 200_000,
    "a place that is not there": HEAD + b"h\x07.",
    "no end": HEAD + b"}",
    "two values": HEAD + b"}}.",
    "protocol 5": pickle.dumps({"w": 1}, 5),
    "protocol 0": pickle.dumps({"w": 1}, 0),
    "torch.save": b"PK\x03\x04" + b"\0" * 100,
    "safetensors": struct.pack("<Q", 2) + b"{}",
    "a binary variable": b"\0" * 64,
    "text": b"hello, these are no weights",
    "nothing": b"",
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_file_raises_and_runs_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.pdparams"):
        read_paddle(written(tmp_path, CRAFTED[name]))
    assert RAN == []
    assert [path.name for path in tmp_path.iterdir()] == ["model.pdparams"]


def test_the_crafted_files_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would see a call: Python's own machine makes it."""
    monkeypatch.chdir(tmp_path)
    for name in ("nested", "inside a name", "array of objects", "reduce os.system"):
        pickle.loads(CRAFTED[name])
    assert len(RAN) == 3
    assert (tmp_path / MARK).exists()
    RAN.clear()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reduce os.system", r"the name (posix|nt|os)\.system.*Nothing of it was run"),
        ("inst", "the instruction INST"),
        ("persistent id", "the instruction PERSID"),
        ("ext1", "the instruction EXT1"),
        ("eval of a text", "eval is called with what Paddle never gives it"),
        ("array of numbers as objects", r"dtype \|O8; .* holds numbers"),
        ("array of a huge shape", "as its bytes"),
        ("torch.save", "as torch.save writes it"),
        ("safetensors", "safetensors file"),
        ("a binary variable", "paddle.save"),
        ("protocol 5", "protocol 2 to 4"),
        ("nothing", "is empty"),
    ],
)
def test_messages_name_the_rule(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_paddle(written(tmp_path, CRAFTED[name]))


def test_lists_of_lists_that_mean_more_than_the_file_holds(tmp_path: Path) -> None:
    """Where they are written again, a thousand million entries by references are as many entries."""
    data = HEAD + b"}X\x01\x00\x00\x00w]q\x00(" + b"K\x01" * 10 + b"e"
    for level in range(30):
        data += b"0]q" + bytes([level + 1]) + b"(" + b"h" + bytes([level]) + (b"h" + bytes([level])) * 9 + b"e"
        if level == 2:
            found = read_paddle(written(tmp_path, data + b"s."))
            assert found["w"][0] is found["w"][9]
    with pytest.raises(CheckpointError, match="name the same values again and again"):
        read_paddle(written(tmp_path, data + b"s."))


def test_too_many_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.checkpoint.paddle_files.paddle_pickle._MOST_READS", 1000)
    with pytest.raises(CheckpointError, match="more instructions than a state has"):
        read_paddle(written(tmp_path, HEAD + b"}" + b"N0" * 2000 + b"."))


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No such file.*model\.pdparams"):
        read_paddle(tmp_path / "model")
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_paddle(tmp_path)
