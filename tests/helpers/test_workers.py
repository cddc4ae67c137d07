"""run_workers itself: results, errors, timeouts and what it leaves behind."""

from __future__ import annotations

import os
import time

import numpy
import pytest
import torch

from tests.helpers.workers import WorkerError, WorkerTimeout, run_workers


def _sum(rank: int, world_size: int, bias: int) -> dict[str, object]:
    total = torch.tensor(float(rank + bias))
    torch.distributed.all_reduce(total)
    array = numpy.arange(6, dtype=numpy.int64).reshape(2, 3) + rank
    return {"total": total, "array": array, "threads": torch.get_num_threads(), "world": world_size}


def _environment(rank: int, world_size: int) -> list[str | None]:
    return [os.environ.get(name) for name in ("PADDLE_TRAINER_ID", "WORLD_SIZE", "EXTRA", "PADDLE_MASTER")]


def _fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        print("about to fail")
        raise KeyError("the reason")
    torch.distributed.barrier()


def _hang(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(60)


def _die(rank: int, world_size: int) -> None:
    os._exit(7)


def test_results_come_back_in_rank_order() -> None:
    results = run_workers(_sum, 2, 10)
    assert [float(result["total"]) for result in results] == [21.0, 21.0]
    assert [result["threads"] for result in results] == [1, 1]
    for rank, result in enumerate(results):
        assert result["array"].dtype == numpy.int64
        assert result["array"].tolist() == [[rank, rank + 1, rank + 2], [rank + 3, rank + 4, rank + 5]]


def test_environment_is_set_replaced_and_removed() -> None:
    results = run_workers(
        _environment, 2, backend=None, environment=lambda rank: {"EXTRA": f"e{rank}", "PADDLE_MASTER": None}
    )
    assert results == [["0", "2", "e0", None], ["1", "2", "e1", None]]


def test_the_first_error_is_raised_with_its_traceback_and_output() -> None:
    with pytest.raises(WorkerError, match="the reason") as caught:
        run_workers(_fail_on_one, 2)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert "_fail_on_one" in str(caught.value)
    assert "about to fail" in str(caught.value)


def test_a_hanging_worker_is_killed_and_its_stack_shown() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerTimeout, match="_hang"):
        run_workers(_hang, 2, timeout_s=3.0, backend=None)
    assert time.monotonic() - start < 20


def test_a_worker_that_dies_without_a_word_is_an_error() -> None:
    with pytest.raises(WorkerError, match="ended with 7"):
        run_workers(_die, 1, backend=None)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="top level"):
        run_workers(lambda rank, world_size: None, 1)
