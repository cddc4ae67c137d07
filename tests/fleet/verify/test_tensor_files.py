"""What is written down is read back as it was: batches of any structure, formats that numpy lacks."""

from pathlib import Path

import pytest
import torch

from fleet.verify.tensor_files import load_tensors, pack, save_tensors, unpack


def test_tensors_come_back(tmp_path: Path) -> None:
    made = {"a": torch.randn(3).bfloat16(), "b": torch.tensor([True, False]), "c": torch.arange(3)}
    save_tensors(tmp_path / "t.npz", made)
    found = load_tensors(tmp_path / "t.npz")
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in made.items())


def test_batches_come_back() -> None:
    tensors: list[torch.Tensor] = []
    batch = {"x": torch.ones(2), "names": ["a", "b"], "pair": (1, None)}
    found = unpack(pack(batch, tensors), tensors)
    assert torch.equal(found["x"], batch["x"])  # type: ignore[arg-type]
    assert found["names"] == ["a", "b"]
    assert found["pair"] == (1, None)
    with pytest.raises(TypeError, match="a object in the batches"):
        pack(object(), tensors)
