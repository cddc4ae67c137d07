"""Pickles that would run code run nothing here, whatever instruction asks for it."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import pickletools
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.checkpoint.conversion.plain_pickle import Named, Opaque, opaque, read_pickle
from fleet.errors import CheckpointError

PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.tuples(inner, inner), st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=20,
)
CODECS = {("_codecs", "encode"): Named(lambda text, coding: text.encode(coding))}  # bytes before protocol 3
CODECS[("__builtin__", "bytes")] = Named(bytes)


@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_is_what_python_reads(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol), CODECS, "x") == value


@given(st.binary(max_size=60))
def test_any_bytes_are_data_or_an_error(data: bytes) -> None:
    with contextlib.suppress(CheckpointError):
        read_pickle(data, {}, "x")


class Stored:
    def __init__(self, size: int) -> None:
        self.size = size


STORED = {(__name__, "Stored"): opaque("Stored")}


def test_an_instance_becomes_its_kind_and_state() -> None:
    shared = Stored(3)
    found = read_pickle(pickle.dumps([shared, shared]), STORED, "x")
    assert found[0] is found[1]
    assert isinstance(found[0], Opaque)
    assert (found[0].kind, found[0].arguments, found[0].state) == ("Stored", (), {"size": 3})


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self._made = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self._made


def crafted(marker: Path) -> dict[str, bytes]:
    """Returns pickles that would make the file ``marker`` when Python reads them, or look for another way in."""
    command = f"touch {marker}"
    system, run = f"cos\nsystem\n(V{command}\ntR.".encode(), f"{command}"
    name = os.system.__module__.encode()
    return {
        "reduce": pickle.dumps(Calls(os.system, run)),
        "nested": pickle.dumps({"a": [(1, {"b": Calls(os.system, run)})]}),
        "protocol 0": system,
        "inst": f"(V{command}\nios\nsystem\n.".encode(),
        "obj": b"(c" + name + b"\nsystem\nV" + command.encode() + b"\no.",
        "build": b"c" + name + b"\nsystem\n}(V__setstate__\nN" + b"ub.",
        "newobj_ex": b"\x80\x04cos\nsystem\n)}\x92.",
        "eval": pickle.dumps(Calls(builtins.eval, f"__import__('os').system({run!r})")),
        "getattr": pickle.dumps(Calls(builtins.getattr, "", "join")),
        "dotted": b"\x80\x04\x8c\x08builtins\x8c\x0deval.__call__\x93\x8c\x011\x85R.",
        "not a text": b"\x80\x04K\x01K\x02\x93.",
        "ext1": b"\x80\x02\x82\x01.",
        "ext2": b"\x80\x02\x83\x01\x00.",
        "ext4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "persid": b"P" + command.encode() + b"\n.",
        "binpersid": b"\x80\x02V" + command.encode() + b"\nQ.",
        "buffer": b"\x80\x05\x97.",
        "state of a call": pickle.dumps(Calls(OrderedDict, state=(None, {"x": Calls(os.system, run)}))),
        "call of data": b"\x80\x04V" + command.encode() + b"\n)R.",
        "state of a list": b"\x80\x04]}b.",
        "items of a text": b"\x80\x04V\nK\x01a.",
        "entries of a list": b"\x80\x04]K\x01K\x02s.",
        "appends to a class": b"cfleet\nx\nK\x01a.",
    }


@pytest.mark.parametrize("case", sorted(crafted(Path("x"))))
def test_a_crafted_file_runs_nothing(case: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    known = {("collections", "OrderedDict"): Named(dict), ("fleet", "x"): opaque("x")}
    with pytest.raises(CheckpointError, match="^x is a pickle with .*Nothing of it was run"):
        read_pickle(crafted(marker)[case], known, "x")
    assert not marker.exists()


def test_the_crafted_files_would_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    for case in ("reduce", "nested", "protocol 0", "inst", "obj", "eval", "state of a call"):
        pickle.loads(crafted(marker)[case])
        assert marker.exists(), case
        marker.unlink()


@pytest.mark.parametrize(
    "data",
    [b"", b".", b"K\x01K\x02.", b"K\x01", b"a.", b"t.", b"h\x05.", b"\x80\x04\x85.", b"\x8c\xff", b"\xff", b"}]]s."],
)
def test_what_is_no_pickle_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="^x is damaged, or no pickle"):
        read_pickle(data, {}, "x")


def test_no_instruction_of_python_is_a_helper_by_accident() -> None:
    from fleet.checkpoint.conversion.plain_pickle import _Machine

    names = {opcode.name.lower() for opcode in pickletools.opcodes}
    helpers = {"refused", "items", "look_up", "take", "extend", "store"}
    assert {name for name in names if hasattr(_Machine, f"_{name}")} & helpers == set()
