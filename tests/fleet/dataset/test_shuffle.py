"""Shuffles over all workers: together they hold the same samples before and after."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fleet
from fleet.dataset.in_memory import InMemoryDataset
from fleet.dataset.samples import Samples
from fleet.dataset.shuffle import choose_workers, exchange_samples, random_places, replaced_places
from fleet.dataset.slots import Slot
from fleet.dataset.text import TextForm, parse
from fleet.dataset.workers import Buffer
from fleet.errors import ConfigError
from tests.fleet.dataset.files import SLOTS, line, write_files
from tests.fleet.dataset.test_in_memory import made, written
from tests.fleet.dataset.test_samples import rows_of
from tests.helpers.workers import run_workers


class Threads:
    """Workers that are threads of this process: a :class:`WorkerGroup` each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meet = threading.Barrier(size, timeout=20)
        self.box: list[list[bytes]] = [[] for _ in range(size)]
        self.largest = 0

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        """Returns what ``work`` returns in every worker; its exceptions stand among the results."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = work(ThreadWorker(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class ThreadWorker:
    """One of them."""

    def __init__(self, job: Threads, rank: int) -> None:
        self.job, self.rank, self.size = job, rank, job.size

    def all_to_all_bytes(self, parts: list[Buffer]) -> list[bytes]:
        """Leaves the parts where all others look."""
        self.job.box[self.rank] = [bytes(part) for part in parts]
        self.job.meet.wait()
        found = [self.job.box[sender][self.rank] for sender in range(self.size)]
        self.job.meet.wait()
        return found

    def barrier(self) -> None:
        """Meets the others."""
        self.job.meet.wait()


FORM = TextForm(tuple(SLOTS))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_an_exchange_brings_every_sample_to_its_worker(counts: list[int], batch: int, threads: int, seed: int) -> None:
    """B.7, global_shuffle: in messages of at most send_batch_size samples."""
    source = np.random.default_rng(seed)
    texts = ["".join(line(100 * rank + number) for number in range(count)) for rank, count in enumerate(counts)]
    blocks = [parse(text.encode(), FORM, "f") for text in texts]
    targets = [source.integers(0, len(counts), count) for count in counts]

    def work(worker: Any) -> Samples:
        return exchange_samples(
            blocks[worker.rank],
            targets[worker.rank],
            FORM,
            worker,
            send_batch_size=batch,
            sleep_s=0,
            num_threads=threads,
        )

    for rank, found in enumerate(Threads(len(counts)).run(work)):
        expected = [
            row
            for block, to in zip(blocks, targets, strict=True)
            for row in rows_of(block.gather(np.flatnonzero(to == rank)))
        ]
        assert Counter(rows_of(found)) == Counter(expected)


def test_messages_are_as_large_as_asked_for_and_sleep_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.7: fleet_send_batch_size, fleet_send_sleep_seconds."""
    block = parse("".join(map(line, range(10))).encode(), FORM, "f")
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    sizes: list[int] = []

    class Counting(ThreadWorker):
        def all_to_all_bytes(self, parts: list[Buffer]) -> list[bytes]:
            found = super().all_to_all_bytes(parts)
            sizes.append(len(found[1 - self.rank]))
            return found

    def work(worker: Any) -> Samples:
        counting = Counting(worker.job, worker.rank)
        away = np.full(10, 1 - worker.rank)
        return exchange_samples(block, away, FORM, counting, send_batch_size=4, sleep_s=0.25, num_threads=1)

    assert [len(found) for found in Threads(2).run(work)] == [10, 10]
    assert slept == [0.25] * 6  # three rounds on each worker: 4, 4 and 2 samples
    assert len(sizes) == 2 * 4


def test_workers_that_read_other_slots_are_told_before_anything_is_sent() -> None:
    forms = [FORM, TextForm((*SLOTS[:2], Slot("click")))]
    blocks = [parse(line(1).encode(), form, "f") for form in forms]

    def work(worker: Any) -> Samples:
        rank = worker.rank
        return exchange_samples(
            blocks[rank], np.zeros(1, np.int64), forms[rank], worker, send_batch_size=1, sleep_s=0, num_threads=1
        )

    for found in Threads(2).run(work):
        assert isinstance(found, ConfigError)
        assert "workers [1] read different slots than worker 0" in str(found)


def test_places() -> None:
    assert sorted(random_places(20).tolist()) == list(range(20))
    assert sorted(replaced_places(20, 20).tolist()) == list(range(20))
    few = replaced_places(200, 4).tolist()
    assert len(few) == 200
    assert len(set(few)) == 4
    assert set(choose_workers(200, 3, None).tolist()) == {0, 1, 2}
    ids = parse(b"1 a 1 1\n1 bb 1 1\n1 a 1 1\n", TextForm((Slot("x", lod_level=1),), parse_ins_id=True), "f").columns[0]
    first, second, third = choose_workers(3, 1000, ids).tolist()
    assert first == third != second


def _shuffle_over_workers(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    fleet.init(is_collective=True)
    torch.manual_seed(rank)
    sizes = [40, 9] if rank == 0 else [30]
    dataset = made(write_files(Path(folder), sizes, first=1000 * rank), batch_size=8, fleet_send_batch_size=5)
    found: dict[str, Any] = {"memory": dataset.get_memory_data_size(fleet)}
    dataset.global_shuffle(fleet, thread_num=2)
    found["lines"] = written(dataset)
    found["shuffled"] = (dataset.get_shuffle_data_size(), dataset.get_shuffle_data_size(fleet))
    merged = InMemoryDataset()
    merged.init(use_var=[Slot("words", lod_level=1)], batch_size=99, parse_ins_id=True, merge_size=2)
    path = Path(folder) / f"ids-{rank}"
    path.write_text("".join(f"1 id{number} 1 {10 * number + rank}\n" for number in range(20)))
    merged.set_filelist([str(path)])
    merged.load_into_memory()
    merged.global_shuffle(fleet)
    found["merged"] = [sorted(row) for batch in merged for row in _rows(batch["words"])]
    return found


def _rows(pair: Any) -> list[list[int]]:
    values, ends = pair[0].tolist(), pair[1].tolist()
    return [values[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]


def test_two_workers_shuffle_globally(tmp_path: Path) -> None:
    """B.7, global_shuffle: the samples of both workers, each once and whole, in other hands and another order."""
    first, second = run_workers(_shuffle_over_workers, 2, str(tmp_path), backend=None)
    before = [line(number) for number in [*range(49), *range(1000, 1030)]]
    assert Counter(first["lines"] + second["lines"]) == Counter(before)
    assert first["memory"] == second["memory"] == 79
    assert first["shuffled"] == (len(first["lines"]), 79)
    assert 20 < len(first["lines"]) < 60
    for found in (first, second):
        of_first = [text in before[:49] for text in found["lines"]]
        assert any(of_first)
        assert not all(of_first)
        assert of_first != sorted(of_first)
        assert found["lines"] != sorted(found["lines"], key=before.index)
    assert sorted(first["merged"] + second["merged"]) == [[10 * number, 10 * number + 1] for number in range(20)]
    assert first["merged"]
    assert second["merged"]
