"""An index comes back from its text; a damaged one, and one whose pieces do not make whole tensors, is refused."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.checkpoint.index import BLOCK_BYTES, DTYPES, DataFile, Index, Piece, TensorEntry
from fleet.errors import CheckpointError

FILE = "data-ab-00000.safetensors"


def small_index() -> Index:
    pieces = [Piece(FILE, 64, (0, 0), (1, 3)), Piece("data-ab-00001.safetensors", 64, (1, 0), (1, 3))]
    return Index(
        tensors={"model/w": TensorEntry("float32", (2, 3), pieces), "model/n": TensorEntry("int64", (0,))},
        aliases={"model/tied": "model/w"},
        values={"epoch": 3, "nan": float("nan"), "text": "\u6743"},
        files={FILE: DataFile(100, (7,)), "data-ab-00001.safetensors": DataFile(BLOCK_BYTES + 1, (8, 9))},
        job={"world_size": 2, "degrees": {"dp": 2}},
    )


def resealed(content: dict[str, Any]) -> str:
    """Returns the text of an index whose sum is right, whatever else is wrong."""
    content = {name: value for name, value in content.items() if name != "sha256"}
    return json.dumps({**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the path of everything inside nested lists and dictionaries."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from places(inner, (*path, name))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(content)
    at = found
    for part in path[:-1]:
        at = at[part]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return found


def test_the_text_gives_the_index_back() -> None:
    index = small_index()
    found = Index.from_json(index.to_json(), "x")
    assert repr(found) == repr(index)  # NaN is not equal to itself
    assert found.tensors["model/w"].num_bytes == 24


def test_an_edit_is_noticed() -> None:
    for path in places(json.loads(small_index().to_json())):
        text = json.dumps(changed(json.loads(small_index().to_json()), path, KeyError))
        with pytest.raises(CheckpointError, match=r"^the index (does not match|is damaged)"):
            Index.from_json(text, "the index")


STRUCTURE = [
    path for path in places(json.loads(small_index().to_json())) if path[0] in ("files", "tensors", "aliases")
]  # fmt: skip


WRONG = [
    (path, wrong)
    for path in STRUCTURE
    for wrong in (None, -1, 10**9, 1.5, "1", True, [[]], "../x")
    if "crc32" not in path[:-1] or type(wrong) is not int  # a sum may be any number; it is compared with the file
]


@pytest.mark.parametrize(("path", "wrong"), WRONG, ids=str)
def test_every_field_that_is_mangled_under_a_right_sum_is_refused(path: tuple[Any, ...], wrong: Any) -> None:
    content = changed(json.loads(small_index().to_json()), path, wrong)
    with pytest.raises(CheckpointError, match="^x"):
        Index.from_json(resealed(content), "x")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda c: c.update(format="zip"), "has the format 'zip'"),
        (lambda c: c.update(version=3), "reads version 2"),
        (lambda c: c.update(block_bytes=5), "reads version 2"),
        (lambda c: c["tensors"]["model/w"]["pieces"].pop(), "parts of .*'model/w'.* are missing"),
        (lambda c: c["tensors"]["model/w"].update(dtype="float3"), "'float3'"),
        (lambda c: c["tensors"]["model/n"].update(shape=[-1]), r"has the shape \[-1\]"),
        (lambda c: c["tensors"]["model/w"]["pieces"][0].__setitem__(1, 89), "outside its tensor or its file"),
        (lambda c: c["tensors"]["model/w"]["pieces"][0].__setitem__(2, [2, 0]), "outside its tensor or its file"),
        (lambda c: c["aliases"].update(x="model/gone"), "stands for 'model/gone', which is missing"),
        (lambda c: c["aliases"].update({"model/n": "model/w"}), "'model/n' is a tensor"),
        (lambda c: c["files"].update({"../x": c["files"][FILE]}), "'../x' is described wrongly"),
        (lambda c: c["files"].update({"a\\b": c["files"][FILE]}), "is described wrongly"),
        (lambda c: c["files"].update({".x": c["files"][FILE]}), "'.x' is described wrongly"),
        (lambda c: c["files"][FILE].update(crc32=[1, 2]), "is described wrongly"),
    ],
)
def test_each_rule_is_named(change: Callable[[Any], Any], rule: str) -> None:
    content = json.loads(small_index().to_json())
    change(content)
    with pytest.raises(CheckpointError, match=rule):
        Index.from_json(resealed(content), "x")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"sha256": 1}', "[" * 100_000, "\udc00"])
def test_what_is_no_index_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="damaged"):
        Index.from_json(text, "x")


def test_a_record_may_know_a_second_name_of_what_others_write() -> None:
    record = Index(aliases={"model/tied": "model/w"}, values={"epoch": 3})
    assert Index.from_json(record.to_json(), "x", is_record=True).aliases == record.aliases
    with pytest.raises(CheckpointError, match="'model/w', which is missing"):
        Index.from_json(record.to_json(), "x")
    with pytest.raises(CheckpointError, match="some parts of .*'model/w'"):
        Index.merged([record])


def record_of(rank: int, *pieces: Piece, shape: tuple[int, ...] = (4, 2), dtype: str = "float32") -> Index:
    return Index(
        tensors={"w": TensorEntry(dtype, shape, [*pieces])}, files={f"data-a-{rank}": DataFile(99, (rank,))},
        values={"rank": rank}, job={"rank": rank}, aliases={"w2": "w"},
    )  # fmt: skip


def test_records_make_one_index() -> None:
    halves = [record_of(rank, Piece(f"data-a-{rank}", 64, (2 * rank, 0), (2, 2))) for rank in range(2)]
    found = Index.merged(halves)
    found.check("x")
    assert [piece.offsets for piece in found.tensors["w"].pieces] == [(0, 0), (2, 0)]
    assert (found.values, found.job, sorted(found.files)) == ({"rank": 0}, {"rank": 0}, ["data-a-0", "data-a-1"])


def test_records_that_disagree_or_leave_holes_are_refused() -> None:
    whole = record_of(0, Piece("data-a-0", 64, (0, 0), (4, 2)))
    with pytest.raises(CheckpointError, match=r"float32 \[4, 2\] and float32 \[5\]"):
        Index.merged([whole, record_of(1, shape=(5,))])
    with pytest.raises(CheckpointError, match="different tensors"):
        Index.merged([whole, record_of(1, dtype="int32")])
    with pytest.raises(CheckpointError, match="No worker saved some parts"):
        Index.merged([record_of(0, Piece("data-a-0", 64, (0, 0), (4, 1)))])


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Piece]]:
    """Returns a shape and boxes inside it."""
    shape = draw(SHAPES)
    found = []
    for _ in range(draw(st.integers(0, 5))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        sizes = tuple(draw(st.integers(0, size - o)) for o, size in zip(offsets, shape, strict=True))
        found.append(Piece("f", 0, offsets, sizes))
    return shape, found


def cells(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {()}
    for offset, size in zip(offsets, sizes, strict=True):
        found = {(*cell, at) for cell in found for at in range(offset, offset + size)}
    return found


@given(boxes())
def test_holes_are_the_cells_that_no_piece_has(drawn: tuple[tuple[int, ...], list[Piece]]) -> None:
    shape, pieces = drawn
    covered = set().union(*[cells(piece.offsets, piece.sizes) for piece in pieces])
    is_whole = covered == cells((0,) * len(shape), shape)
    assert Index(tensors={"w": TensorEntry("int8", shape, pieces)}).holes() == ([] if is_whole else ["w"])


@given(boxes(), st.integers(-1, 5), st.integers(-1, 5))
def test_a_piece_lies_in_its_tensor_where_all_its_cells_do(
    drawn: tuple[tuple[int, ...], list[Piece]], offset: int, size: int
) -> None:
    shape, pieces = drawn
    assert all(piece.lies_in(shape) for piece in pieces)
    assert Piece("f", 0, (offset,), (size,)).lies_in((3,)) == (offset >= 0 and size >= 0 and offset + size <= 3)
    assert not Piece("f", 0, (0,), (1,)).lies_in((1, 1))


def test_the_types_are_those_of_torch_and_safetensors() -> None:
    import torch
    from safetensors.torch import load, save

    for name, (size, _) in DTYPES.items():
        dtype = getattr(torch, name)
        assert dtype.itemsize == size
        data = save({"a": torch.zeros(2, dtype=dtype)})
        assert f'"dtype":"{DTYPES[name][1]}"'.encode() in data
        assert load(data)["a"].dtype == dtype
