"""InMemoryDataset: loading, order, batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.dataset import source
from fleet.dataset.batch import Batch
from fleet.dataset.in_memory import InMemoryDataset
from fleet.dataset.slots import Slot
from fleet.errors import ConfigError, NotInitializedError
from tests.fleet.dataset.files import SLOTS, line, write_files


def made(files: list[str], **options: Any) -> InMemoryDataset:
    """Returns a dataset with these files, loaded."""
    dataset = InMemoryDataset()
    dataset.init(**{"use_var": SLOTS, **options})
    dataset.set_filelist(files)
    dataset.load_into_memory()
    return dataset


def written(dataset: InMemoryDataset) -> list[str]:
    """Returns each sample as the line it was made from, if nothing was mixed up."""
    lines = []
    for batch in dataset:
        words, offsets = batch["words"]
        ends = offsets.tolist()
        for index, (prices, label) in enumerate(zip(batch["prices"].tolist(), batch["label"].tolist(), strict=True)):  # type: ignore[union-attr]
            own = words[ends[index] : ends[index + 1]].tolist()
            shown = " ".join(map(str, own))
            lines.append(
                f"{len(own)} {shown} 2 {prices[0]} {int(prices[1])} 1 {label[0]}\n".replace(" 0 1 0", " -0 1 0")
            )
    return lines


def test_batches_are_tensors_by_slot(tmp_path: Path) -> None:
    """B.7: iteration; dense slots as tensors, sparse ones as values and offsets."""
    dataset = made(write_files(tmp_path, [2, 3]), batch_size=3)
    first, second = list(dataset)
    assert len(dataset) == 2
    assert isinstance(first, Batch)
    assert list(first) == ["words", "prices", "label"]
    assert (first.num_samples, second.num_samples) == (3, 2)
    words, offsets = first["words"]
    assert words.tolist() == [0, 10, 11, 20, 21, 22]
    assert offsets.tolist() == [0, 1, 3, 6]
    assert (words.dtype, offsets.dtype) == (torch.int64, torch.int64)
    assert isinstance(first["prices"], torch.Tensor)
    assert first["prices"].tolist() == [[0.5, 0.0], [1.5, -1.0], [2.5, -2.0]]
    assert first["prices"].dtype is torch.float32
    assert isinstance(second["label"], torch.Tensor)
    assert second["label"].tolist() == [[3], [4]]
    weight = torch.arange(100.0).view(100, 1)
    bags = torch.nn.functional.embedding_bag(words, weight, offsets, mode="sum", include_last_offset=True)
    assert bags.flatten().tolist() == [0, 21, 63]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=4), st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_loading_keeps_the_order_of_files_and_shuffles_keep_the_samples(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], threads: int, batch_size: int, block: bool
) -> None:
    """B.7: load_into_memory, local_shuffle, global_shuffle(None): the same samples, whole, each once."""
    folder = tmp_path_factory.mktemp("files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "_BLOCK_BYTES", 50 if block else 1 << 20)
        dataset = made(write_files(folder, sizes), thread_num=threads, batch_size=batch_size)
    lines = [line(number) for number in range(sum(sizes))]
    assert written(dataset) == lines
    assert dataset.get_memory_data_size() == len(lines)
    assert dataset.get_shuffle_data_size() == 0
    for shuffle in (dataset.local_shuffle, dataset.global_shuffle):
        shuffle()
        assert Counter(written(dataset)) == Counter(lines)
        assert dataset.get_shuffle_data_size() == len(lines)


def test_a_shuffle_is_random_and_a_seed_fixes_it(tmp_path: Path) -> None:
    dataset = made(write_files(tmp_path, [50]), batch_size=50)
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        dataset.load_into_memory(is_shuffle=True)
        orders.append(written(dataset))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != [line(number) for number in range(50)]


def test_preloading_goes_on_beside_the_batches(tmp_path: Path) -> None:
    """B.7: preload_into_memory, wait_preload_done."""
    dataset = made(write_files(tmp_path, [4]))
    dataset.set_filelist(write_files(tmp_path, [2, 3], first=4))
    dataset.preload_into_memory(thread_num=2)
    assert written(dataset) == [line(number) for number in range(4)]
    with pytest.raises(ConfigError, match="already running"):
        dataset.preload_into_memory()
    dataset.wait_preload_done()
    assert written(dataset) == [line(number) for number in range(4, 9)]
    with pytest.raises(NotInitializedError, match="needs preload_into_memory"):
        dataset.wait_preload_done()
    with pytest.raises(ConfigError, match="at least 1"):
        dataset.preload_into_memory(thread_num=0)


def test_what_a_preload_meets_is_raised_by_the_wait(tmp_path: Path) -> None:
    dataset = made(write_files(tmp_path, [4]))
    bad = tmp_path / "bad"
    bad.write_text("1 x\n")
    dataset.set_filelist([str(bad)])
    dataset.preload_into_memory()
    with pytest.raises(ConfigError, match="bad, line 1"):
        dataset.wait_preload_done()
    assert len(written(dataset)) == 4
    dataset.preload_into_memory()
    dataset.release_memory()
    with pytest.raises(NotInitializedError, match="load_into_memory"):
        list(dataset)


def test_a_failed_load_leaves_the_memory_as_it_was(tmp_path: Path) -> None:
    dataset = made(write_files(tmp_path, [4]), thread_num=2)
    bad = tmp_path / "bad"
    bad.write_text("1 7 2 1 1 1 0\n1 7 2 1 1 1\n")
    dataset.set_filelist([*write_files(tmp_path, [3], first=4), str(bad)])
    with pytest.raises(ConfigError, match="bad, line 2: slot 'label'"):
        dataset.load_into_memory()
    assert len(written(dataset)) == 4


def test_release_lets_go_of_the_samples(tmp_path: Path) -> None:
    """B.7: release_memory."""
    dataset = made(write_files(tmp_path, [4]))
    with pytest.raises(ConfigError, match=r"use_var=\.\.\.\) while samples are in memory"):
        dataset.update_settings(use_var=SLOTS[:1])
    dataset.update_settings(batch_size=2, use_var=SLOTS)
    dataset.release_memory()
    assert (dataset.get_memory_data_size(), len(dataset)) == (0, 0)
    for call in (
        dataset.local_shuffle,
        dataset.global_shuffle,
        lambda: dataset.slots_shuffle([]),
        lambda: list(dataset),
    ):
        with pytest.raises(NotInitializedError, match="load_into_memory"):
            call()
    dataset.update_settings(use_var=SLOTS[:1])


def test_slots_shuffle_moves_the_values_of_these_slots_alone(tmp_path: Path) -> None:
    """B.7: slots_shuffle, fea_eval, candidate_size."""
    dataset = made(write_files(tmp_path, [60]), batch_size=60, fea_eval=True)
    (before,) = list(dataset)
    dataset.slots_shuffle(["prices"])
    (after,) = list(dataset)
    assert torch.equal(after["words"][0], before["words"][0])
    assert torch.equal(after["label"], before["label"])  # type: ignore[arg-type]
    assert not torch.equal(after["prices"], before["prices"])  # type: ignore[arg-type]
    assert sorted(after["prices"].tolist()) == sorted(before["prices"].tolist())  # type: ignore[union-attr]
    dataset.slots_shuffle(["words"])
    (third,) = list(dataset)
    assert torch.equal(third["prices"], before["prices"])  # type: ignore[arg-type]
    assert not torch.equal(third["words"][0], before["words"][0])
    dataset.slots_shuffle([])
    assert torch.equal(next(iter(dataset))["words"][0], before["words"][0])
    dataset.update_settings(candidate_size=3)
    dataset.slots_shuffle(["label"])
    assert len(set(next(iter(dataset))["label"].flatten().tolist())) <= 3  # type: ignore[union-attr]


def test_slots_shuffle_says_what_it_needs(tmp_path: Path) -> None:
    dataset = made(write_files(tmp_path, [3]))
    with pytest.raises(ConfigError, match="needs init.fea_eval=True"):
        dataset.slots_shuffle(["words"])
    dataset.update_settings(fea_eval=True)
    for wrong in ("words", ["nothing"], 3):
        with pytest.raises(ConfigError, match="takes a list of slot names"):
            dataset.slots_shuffle(wrong)  # type: ignore[arg-type]


def test_ids_and_contents_come_with_the_batch(tmp_path: Path) -> None:
    """B.7: parse_ins_id, parse_content."""
    path = tmp_path / "part-0"
    path.write_text("1 a 1 first 2 7 8\n1 b 1 second 1 9\n")
    dataset = made(
        [str(path)], use_var=[Slot("words", lod_level=1)], batch_size=2, parse_ins_id=True, parse_content=True
    )
    (batch,) = list(dataset)
    assert (batch.ins_ids, batch.contents) == (["a", "b"], ["first", "second"])
    assert batch["words"][0].tolist() == [7, 8, 9]


def test_samples_of_one_id_are_merged(tmp_path: Path) -> None:
    """B.7, merge_by_lineid: after the shuffle, samples with the same ins_id become one."""
    path = tmp_path / "part-0"
    rows = ["1 a 1 7 1 5", "1 b 1 8 1 5", "1 a 2 9 10 1 5", "1 c 1 1 1 1", "1 c 1 1 1 2", "1 b 1 3 1 5", "1 b 1 4 1 5"]
    path.write_text("\n".join(rows))
    slots = [Slot("words", lod_level=1), Slot("label")]
    dataset = made([str(path)], use_var=slots, batch_size=9, parse_ins_id=True, merge_size=2)
    dataset.global_shuffle()
    (batch,) = list(dataset)
    assert batch.ins_ids == ["a"]  # b comes three times, and c with two labels
    assert sorted(batch["words"][0].tolist()) == [7, 9, 10]
    assert batch["words"][1].tolist() == [0, 3]
    assert isinstance(batch["label"], torch.Tensor)
    assert batch["label"].tolist() == [[5]]


def test_a_line_may_be_a_batch(tmp_path: Path) -> None:
    """B.7: input_type=1."""
    path = tmp_path / "part-0"
    path.write_text("3 1 2 3 4 1 2 3 4 2 0 1\n1 4 2 5 6 1 1\n")
    dataset = made([str(path)], input_type=1)
    first, second = list(dataset)
    assert isinstance(first["prices"], torch.Tensor)
    assert first["prices"].tolist() == [[1, 2], [3, 4]]
    assert isinstance(first["label"], torch.Tensor)
    assert first["label"].tolist() == [[0], [1]]
    assert isinstance(second["prices"], torch.Tensor)
    assert second["prices"].shape == (1, 2)
    assert [part.tolist() for part in first["words"]] == [[1, 2, 3], [0, 1, 2, 3]]
