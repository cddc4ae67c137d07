"""Lists of transforms: order, files, and the same bits in any batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.errors import CheckpointError, ConfigError
from fleet.features import Bucketize, Clip, Cross, Hash, Log, Transforms, Vocabulary

EVERY = Transforms(
    [
        Hash("site", out="site_id"),
        Clip("price", high=1000),
        Log("price"),
        Bucketize("age", [18, 30.5], out="group"),
        Vocabulary("tags", ["red", "blue"], num_oov=4),
        Cross(["site_id", "tags"], out="site_by_tag", num_buckets=10**9, seed=3),
        Hash("group", num_buckets=7),
    ]
)


def batch_of(rows: list[tuple[str, float, int, list[str]]]) -> dict[str, Any]:
    offsets = np.cumsum([0, *(len(tags) for *_, tags in rows)])[:-1]
    return {
        "site": [site for site, *_ in rows],
        "price": np.array([price for _, price, *_ in rows], np.float32),
        "age": torch.tensor([age for _, _, age, _ in rows], dtype=torch.int64),
        "tags": np.array([tag for *_, tags in rows for tag in tags], object),
        "tags.offsets": torch.from_numpy(offsets).long(),
        "label": torch.ones(len(rows)),
    }


ROWS = st.lists(
    st.tuples(
        st.text(max_size=4),
        st.floats(-1e6, 1e6, width=32),
        st.integers(-5, 99),
        st.lists(st.sampled_from(["red", "blue", "x", "y"]), max_size=3),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, cut=st.integers(1, 11))
def test_a_row_gives_the_same_bits_in_any_batch(rows: list[Any], cut: int) -> None:
    cut = min(cut, len(rows) - 1)
    whole, first, second = (EVERY(batch_of(part)) for part in (rows, rows[:cut], rows[cut:]))
    assert set(whole) == {
        *("price", "age", "group", "tags", "tags.offsets", "label", "site_id", "site_by_tag", "site_by_tag.offsets")
    }
    for name in whole:
        if not name.endswith(".offsets"):
            np.testing.assert_array_equal(whole[name], np.concatenate([first[name], second[name]]))
    ends = len(first["site_by_tag"])
    assert whole["site_by_tag.offsets"].tolist()[cut:] == [ends + at for at in second["site_by_tag.offsets"].tolist()]


def test_tensors_and_the_given_batch() -> None:
    batch = batch_of([("a", 2.0, 3, ["red"]), ("b", 5.0, 30, [])])
    before = dict(batch)
    found = EVERY(batch)
    assert batch == before
    assert isinstance(found["group"], torch.Tensor)  # age is a tensor
    assert isinstance(found["site_id"], np.ndarray)
    assert found["label"] is batch["label"]


def test_a_file_gives_the_same_transforms_in_a_process_without_torch(tmp_path: Path) -> None:
    assert EVERY.save(tmp_path) == tmp_path / "transforms.json"
    assert Transforms.load(tmp_path) == Transforms.load(tmp_path / "transforms.json") == EVERY
    assert hash(Transforms.load(tmp_path)) == hash(EVERY)
    script = (
        "import sys; from fleet.features import Transforms; t = Transforms.load(sys.argv[1]);"
        "b = t({'site': ['a'], 'price': [2.0], 'age': [3], 'tags': ['red'], 'tags.offsets': [0]});"
        "assert 'torch' not in sys.modules; print(b['site_by_tag'].tolist(), b['group'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120)
    found = EVERY(batch_of([("a", 2.0, 3, ["red"])]))
    assert done.stdout.strip() == f"{found['site_by_tag'].tolist()} {found['group'].tolist()}", done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no saved transforms"),
        ("[]", "no saved transforms"),
        ('{"format": 2, "transforms": []}', "format 2"),
        ('{"format": 1, "transforms": [{"kind": "Pickle"}]}', "no transform is named .'Pickle'"),
        ('{"format": 1, "transforms": [{"kind": "Log", "column": "x"}]}', "another release"),
        (
            '{"format": 1, "transforms": [{"kind": "Bucketize", "column": "x", "boundaries": 3, "out": null}]}',
            "another type",
        ),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "transforms.json").write_text(text)
    with pytest.raises((CheckpointError, ConfigError), match=said):
        Transforms.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Transforms.load(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: Transforms([3]), "is no transform"),  # type: ignore[list-item]
        (lambda: Transforms([Log("x", out="y"), Hash("y")]), "reads text or int; 'y' is float by then"),
        (lambda: Transforms([Log("x", out="y"), Clip("z", 0, 1, out="y")]), "another transform writes 'y' before"),
        (lambda: Transforms([Log("x", out="y"), Clip("z", 0, 1, out="x")]), "which a transform before it reads"),
    ],
)
def test_lists_that_make_no_sense(made: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made()


@pytest.mark.parametrize(
    ("transforms", "batch", "text"),
    [
        ([Log("x")], {"y": [1.0]}, "no column 'x'; it has .'y'."),
        ([Hash("x")], {"x": [1.5]}, "reads text or int; column 'x' is float"),
        ([Log("x")], {"x": ["a"]}, "reads int or float; column 'x' is text"),
        ([Log("x", out="y")], {"x": [1.0], "y": [1]}, "the batch has a column 'y'"),
        ([Log("x")], {"x": 1.0}, "of shape"),
        ([Log("x")], {"x": [True]}, "is bool"),
        ([Log("x")], {"x": [1.0], "x.offsets": [1]}, "says where bags begin"),
        ([Log("x")], {"x": [1.0], "x.offsets": [0, 2]}, "says where bags begin"),
        ([Log("x")], {"x": [[1.0], [1.0, 2.0]]}, "rows of different lengths"),
        ([Hash("x")], {"x": [None]}, "holds None"),
    ],
)
def test_batches_that_do_not_fit(transforms: list[Any], batch: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Transforms(transforms)(batch)


def test_requests_with_nothing_in_them() -> None:
    """A sample without tags, and a batch without samples, as JSON gives them."""
    found = EVERY({"site": ["a"], "price": [1.0], "age": [3], "tags": [], "tags.offsets": [0]})
    assert (found["tags"].shape, found["site_by_tag"].shape) == ((0,), (0,))
    assert found["site_by_tag.offsets"].tolist() == [0]
    found = EVERY({"site": [], "price": [], "age": [], "tags": [], "tags.offsets": []})
    assert {name: len(value) for name, value in found.items()} == dict.fromkeys(found, 0)
    assert found["price"].dtype == np.float32


def test_every_source_of_a_value_gives_the_same() -> None:
    """A request's lists have float64 and Python's text, files float32 and uint64."""
    numbers = Transforms([Bucketize("x", [0.1, 0.7], out="b"), Clip("x", 0, 0.5, out="c"), Log("x")])
    one, other = (numbers({"x": values}) for values in ([0.7, 0.3], np.array([0.7, 0.3], np.float32)))
    for name in ("b", "c", "x"):
        assert one[name].dtype == other[name].dtype
        assert one[name].tolist() == other[name].tolist()
    large = Transforms([Bucketize("x", [5.0])])
    assert large({"x": np.array([2**63 + 1], np.uint64)})["x"].tolist() == [0]  # the same bits, negative
    words = Transforms([Hash("x", num_buckets=1000)])
    assert (
        words({"x": ["a\0"]})["x"].tolist()
        == words({"x": np.array(["a\0"], object)})["x"].tolist()
        != (words({"x": ["a"]})["x"].tolist())
    )
    for mixed in (["a", 7], [7, "a"]):
        with pytest.raises(ConfigError, match="column 'x' holds 7"):
            words({"x": mixed})
    with pytest.raises(ConfigError, match="none lies in the range"):
        Transforms([Clip("x", 0.5, 0.7)])({"x": [0, 1]})
    assert Transforms([Clip("x", 0, 1e300)])({"x": [-1, 5]})["x"].tolist() == [0, 5]


def test_a_chain_in_place() -> None:
    found = Transforms([Clip("x", 0, 10), Log("x"), Bucketize("x", [1.0])])({"x": [-5.0, 3.0, 1e9]})
    assert found["x"].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "one", [Hash("b"), Vocabulary("b", [1]), Bucketize("b", [1]), Clip("b", 0), Log("b"), Cross(["a", "b"], out="c")]
)
@pytest.mark.parametrize("b", [{"b": [1, 2]}, {"b": [1, 2, 3], "b.offsets": [0, 1]}, {"b": torch.tensor([1])}])
def test_columns_of_different_lengths(one: Any, b: dict[str, Any]) -> None:
    """Whatever reads them: a row of one would come beside another row of the other."""
    with pytest.raises(ConfigError, match="different numbers"):
        Transforms([Hash("a"), one])({"a": [1, 2, 3], **b})
    assert Transforms([one])({"a": b["b"], **b}) if one.inputs == ("b",) else True


def test_an_unknown_key_of_a_file() -> None:
    text = Transforms([Hash("a")]).to_json()
    with pytest.raises(CheckpointError, match=r"\['order'\] mean nothing"):
        Transforms.from_json(text.replace('"format"', '"order": [0], "format"'))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a word", "numbers or text, one or more for each row; for one row, a list of one"),
        ([["a", "b"], ["c"]], "'site' has rows of different lengths; write a bag as flat values and 'site.offsets'"),
        (["\ud800"], "no Unicode text"),
    ],
)
def test_text_that_is_no_column_of_text(value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Transforms([Hash("site")])({"site": value})


def test_a_tensor_of_bfloat16_is_taken_as_float32() -> None:
    values = torch.tensor([0.1, 7.0], dtype=torch.bfloat16)
    found = Transforms([Log("price")])({"price": values})["price"]
    assert torch.equal(found, Transforms([Log("price")])({"price": values.float()})["price"])


def test_what_is_no_list_and_no_name() -> None:
    with pytest.raises(ConfigError, match="takes a list of transforms"):
        Transforms(Hash("site"))  # type: ignore[arg-type]
    for make in (lambda: Hash(7), lambda: Hash("site", out=7), lambda: Hash(None)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="a column's name is"):
            make()


def test_a_folder_that_does_not_exist_yet_is_made(tmp_path: Path) -> None:
    """It is not taken for the name of a file, which would stand where the model is saved next."""
    transforms = Transforms([Hash("site")])
    assert transforms.save(tmp_path / "a" / "model") == tmp_path / "a" / "model" / "transforms.json"
    assert Transforms.load(tmp_path / "a" / "model") == transforms
    assert transforms.save(tmp_path / "own.json") == tmp_path / "own.json"
    (tmp_path / "script.py").write_text("print()")
    with pytest.raises(CheckpointError, match="cannot be written"):
        transforms.save(tmp_path / "script.py")
    with pytest.raises(ConfigError, match="takes a folder"):
        transforms.save(None)  # type: ignore[arg-type]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Transforms.load(tmp_path / "pipe")


def test_a_batch_is_columns_and_not_rows() -> None:
    for batch in ([{"x": 1}], None, "x"):
        with pytest.raises(ConfigError, match=r"takes a mapping of columns, such as \{'x': \[...\]\}"):
            Transforms([Hash("x")])(batch)  # type: ignore[arg-type]


def test_unsigned_ids_of_json_are_integers_in_any_batch() -> None:
    """Numpy makes floats of a list with integers on both sides of 2**63."""
    both = Transforms([Hash("x", out="id"), Bucketize("x", [0])])
    rows = [7, 2**63, 2**64 - 1, 2**53 + 1]
    made = both({"x": rows})
    assert made["id"].tolist() == [both({"x": [row]})["id"][0] for row in rows]
    assert made["x"].tolist() == [both({"x": [row]})["x"][0] for row in rows] == [1, 0, 0, 1]
    assert both({"x": [2**64 - 1, -1]})["id"].tolist() == [made["id"][2]] * 2


def test_a_large_integer_beside_a_fraction_is_refused() -> None:
    """It would be another number than in a batch of integers."""
    transforms = Transforms([Bucketize("n", [2**24 + 1])])
    assert transforms({"n": [2**24 + 1, 2**24]})["n"].tolist() == [1, 0]
    assert transforms({"n": [2**24, 0.5]})["n"].tolist() == [0, 0]
    assert transforms({"n": [20_000_000, 0.5, -(2**60)]})["n"].tolist() == [1, 0, 0]  # which float32 holds
    for values, odd in (
        ([2**24 + 1, 0.5], 2**24 + 1),
        ([0.5, 1 - 2**60], 1 - 2**60),
        ([np.int64(2**30 + 1), 0.5], 2**30 + 1),
    ):
        with pytest.raises(ConfigError, match=f"column 'n' holds the integer {odd} beside fractions"):
            transforms({"n": values})
