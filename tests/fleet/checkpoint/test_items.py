"""Items: what a worker writes of the tensors it holds, and how tensors are filled from pieces."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from fleet.checkpoint.boxes import HeldBox
from fleet.checkpoint.commit import Share, read_index, write_share
from fleet.checkpoint.index import BLOCK_BYTES, TensorEntry
from fleet.checkpoint.items import Item, SavedTensors, copy_into, misfits, raw_bytes, written_by
from fleet.checkpoint.storage import LocalFolder
from fleet.errors import CheckpointError

WHOLE = {
    "a": torch.randn(40, 30, generator=torch.Generator().manual_seed(1)),
    "b": torch.arange(7, dtype=torch.int64),
    "c": torch.randn(9, 5).to(torch.bfloat16),
    "d": torch.tensor(2.5),
    "e": torch.tensor([True, False]),
    "f": torch.zeros(0, 4),
    "g": torch.randn(6, 4).t(),
}


def write(folder: LocalFolder, world_size: int) -> None:
    """Writes ``WHOLE`` from ``world_size`` holders of all of it."""
    items = [
        Item(name, tuple(t.shape), [HeldBox((0,) * t.dim(), t)], tuple(range(world_size))) for name, t in WHOLE.items()
    ]
    for rank in reversed(range(world_size)):
        written = written_by(items, rank)
        share = Share("ab", rank, world_size, [block for block, _ in written])
        write_share(folder, share, raw_bytes(view for _, view in written))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_tensors_that_several_hold_come_back_whole(tmp_path: Path, world_size: int) -> None:
    folder = LocalFolder(tmp_path / "new")
    write(folder, world_size)
    source = SavedTensors(folder, read_index(folder))
    for name, tensor in WHOLE.items():
        assert torch.equal(source.whole(name), tensor)
    sizes = [file.num_bytes for file in source.index.files.values()]
    assert max(sizes) < sum(t.numel() * t.element_size() for t in WHOLE.values()) / world_size + 2048


@pytest.mark.parametrize("seed", range(20))
def test_a_box_reads_its_rows_alone(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    folder = LocalFolder(tmp_path)
    write(folder, drawn.randint(1, 4))
    top, left = drawn.randint(0, 39), drawn.randint(0, 29)
    target = torch.full((drawn.randint(1, 40 - top), drawn.randint(1, 30 - left)), -1.0)
    source = SavedTensors(folder, read_index(folder), check_sums=False)
    source.fill("a", [HeldBox((top, left), target)])
    assert torch.equal(target, WHOLE["a"][top : top + target.shape[0], left : left + target.shape[1]])
    assert source.num_read == target.shape[0] * 30 * 4


def test_only_the_first_holder_writes_what_may_differ() -> None:
    item = Item("x", (4,), [HeldBox((0,), torch.zeros(4))], (1, 2), alone=True)
    assert [len(written_by([item], rank)) for rank in range(3)] == [0, 1, 0]
    shared = Item("x", (4,), [HeldBox((0,), torch.zeros(4))], (1, 2))
    assert [[block.sizes for block, _ in written_by([shared], rank)] for rank in range(3)] == [[], [(2,)], [(2,)]]


def test_a_type_that_files_cannot_hold_is_refused() -> None:
    item = Item("x", (2,), [HeldBox((0,), torch.zeros(2, dtype=torch.complex128))], (0,))
    with pytest.raises(CheckpointError, match="'x' has the type complex128"):
        written_by([item], 0)


def test_a_buffer_has_the_bytes_of_a_file() -> None:
    items = [Item(name, tuple(t.shape), [HeldBox((0,) * t.dim(), t)], (0,)) for name, t in WHOLE.items()]
    written = written_by(items, 0)
    buffer = bytearray(sum(block.num_bytes for block, _ in written))
    copy_into(buffer, written)
    assert bytes(buffer) == b"".join(data.tobytes() for data in raw_bytes(view for _, view in written))


def test_a_damaged_block_is_named_where_it_is_touched(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    big = torch.arange(BLOCK_BYTES, dtype=torch.float32).view(-1, 1024)
    share = Share(
        "ab", 0, 1, [block for block, _ in written_by([Item("big", (1024, 1024), [HeldBox((0, 0), big)], (0,))], 0)]
    )
    write_share(folder, share, raw_bytes([big]))
    file = tmp_path / share.data_name
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    source = SavedTensors(folder, read_index(folder))
    top = torch.empty(10, 1024)
    source.fill("big", [HeldBox((0, 0), top)])
    assert torch.equal(top, big[:10]), "the block that is read is whole"
    with pytest.raises(CheckpointError, match=r"data-ab-00000\.safetensors: bytes \d+ to \d+ do not match"):
        source.whole("big")
    assert torch.isfinite(SavedTensors(folder, read_index(folder), check_sums=False).whole("big")[0]).all()


def test_a_missing_name_is_named_with_what_is_near(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    write(folder, 1)
    with pytest.raises(CheckpointError, match="holds no 'aa'"):
        SavedTensors(folder, read_index(folder)).whole("aa")


def test_misfits_name_what_is_missing_and_what_has_another_shape() -> None:
    found = misfits({"a": (2,), "b": (3,)}, {"a": None, "b": TensorEntry("float32", (4,))})
    assert found == [
        "missing: ['a'] (1 in all)",
        "of another shape: 'b' is [4] in the checkpoint and [3] here (1 in all)",
    ]
