"""Files in Criteo's format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.examples.wide_and_deep.example import criteo_line, example_module

criteo = example_module("criteo")
data = example_module("data")


def test_fields_become_numbers_and_ids(tmp_path: Path) -> None:
    """Issue 4: missing fields are 0; equal categories of one column are one id, of two columns two."""
    lines = [
        criteo_line(1, ["0", "-3", "", "7"], ["68fd1e64", "80e26c9b"]),
        criteo_line(0, ["1"], ["80e26c9b", "80e26c9b"]),
    ]
    (tmp_path / "a").write_text(lines[0] * 10)
    (tmp_path / "b").write_text(lines[1] * 10)
    train, test = criteo.read_criteo(tmp_path)
    assert (len(train.labels), len(test.labels)) == (18, 2)
    assert train.labels.tolist() == [1.0] * 10 + [0.0] * 8
    np.testing.assert_allclose(train.dense[0, :5], [0, -np.log(4), 0, np.log(8), 0], rtol=1e-6)
    assert train.ids[0, 0] == data.hash_id("C1", "68fd1e64")
    assert train.ids[0, 1] == train.ids[10, 1] == data.hash_id("C2", "80e26c9b")
    assert train.ids[10, 0] == data.hash_id("C1", "80e26c9b") != train.ids[10, 1]
    assert set(train.ids[:, 2:].ravel()) == {0}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t2\n", "line 2: 2 fields; Criteo's format has 40"),
        (criteo_line(2, [], []), "line 2: the label is '2'"),
        (criteo_line(1, ["x"], []), "line 2: invalid literal"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "part-0"
    path.write_text(criteo_line(1, [], []) + line)
    with pytest.raises(ValueError, match=message) as raised:
        criteo.read_criteo(path)
    assert str(path) in str(raised.value)


def test_one_line_is_too_few(tmp_path: Path) -> None:
    path = tmp_path / "part-0"
    path.write_text(criteo_line(1, [], []))
    with pytest.raises(ValueError, match="holds 1 lines; at least 2"):
        criteo.read_criteo(path)
