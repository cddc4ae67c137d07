"""What docs/guides/checkpoint.md shows of Paddle's files runs, on recorded files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fleet import checkpoint
from tests.fleet.checkpoint.paddle_files.test_paddle_tables import write_shards
from tests.helpers.paddle_files import RECORDED
from tests.helpers.sources import ROOT


def blocks_after(heading: str) -> list[str]:
    text = (ROOT / "docs" / "guides" / "checkpoint.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adam.pdparams", "adam.pdopt"):
        shutil.copy(RECORDED / "3.3.1" / name, tmp_path)
    with np.load(RECORDED / "tables" / "adam.npz") as recorded:
        write_shards(tmp_path / "paddle_model", str(recorded["mode0"]), compress=True)
        (tmp_path / "paddle_model" / "001").mkdir()
        (tmp_path / "paddle_model" / "001" / "part-000").write_text(str(recorded["dense"]))
        rows = recorded["rows"]
    monkeypatch.chdir(tmp_path)
    files, tables = blocks_after("Paddle's files")
    found: dict[str, Any] = {}
    exec(files, found)
    assert float(found["optimizer"].state_dict()["state"][3]["step"]) == 5
    saved = checkpoint.read_paddle("adam.pdparams")
    assert torch.equal(found["model"][0].weight, saved["0.weight"].t())
    exec(tables, found)
    np.testing.assert_allclose(found["table"].pull(np.arange(10), create=False), rows, rtol=5e-6)
    assert (tmp_path / "model" / "ads").is_dir()
    assert {name: tuple(value.shape) for name, value in found["dense"].items()} == {
        "fc_0.w_0": (4, 1),
        "fc_0.b_0": (1,),
    }


def test_public_names() -> None:
    assert set(checkpoint.__all__) <= set(dir(checkpoint))
    assert all(callable(getattr(checkpoint, name)) for name in checkpoint.__all__)
    with pytest.raises(AttributeError, match="paddle_state"):
        checkpoint.paddle_stat  # noqa: B018
