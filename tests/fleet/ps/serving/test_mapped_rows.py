from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet.errors import CheckpointError
from fleet.ps.publishing.delta import decode, encode
from fleet.ps.serving.mapped_rows import MappedRows, map_file


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "int8"])
def test_rows_at_any_address(tmp_path: Path, encoding: str) -> None:
    values = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    stored, scales = encode(values, encoding)
    (tmp_path / "rows").write_bytes(b"\1\2\3" + stored.tobytes())
    octets = map_file(tmp_path / "rows")
    (tmp_path / "rows").unlink()
    mapped = MappedRows(octets, 5, encoding, 3, scales)
    chosen = np.array([19, 0, 7, 7])
    rows = mapped.rows(3 + chosen * 5 * stored.itemsize)
    assert rows.dtype == np.float32
    assert np.array_equal(rows, decode(stored, scales)[chosen])
    assert mapped.rows(np.empty(0, np.int64)).shape == (0, 5)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert len(map_file(tmp_path / "empty")) == 0
    assert MappedRows(map_file(tmp_path / "empty"), 4).rows(np.empty(0, np.int64)).shape == (0, 4)
    with pytest.raises(CheckpointError, match="symbolic link"):
        map_file(tmp_path / "link")
    with pytest.raises(CheckpointError, match="No such file"):
        map_file(tmp_path / "absent")
