"""What is written down is read back as it was: batches of any structure, formats that numpy lacks."""

from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


@dataclass
class Sample:
    x: torch.Tensor
    name: str = ""


class Encoding(UserDict[str, Any]):
    def to(self, device: str) -> "Encoding":
        return self


@pytest.mark.parametrize("batch", [Pair(torch.ones(2), 1), Sample(torch.ones(2), "a"), Encoding({"x": torch.ones(2)})])
def test_objects_of_the_script_come_back(batch: Any) -> None:
    """A loop calls ``batch.to(device)`` of transformers' BatchEncoding, which is a mapping with methods."""
    tensors: list[torch.Tensor] = []
    found = unpack(pack(batch, tensors), tensors)
    assert type(found) is type(batch)
    assert torch.equal(*(one["x"] if isinstance(one, Encoding) else one.x for one in (found, batch)))


def test_memory_that_was_written_can_be_freed(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    save_tensors(tmp_path / "t.npz", {"a": tensor})
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
