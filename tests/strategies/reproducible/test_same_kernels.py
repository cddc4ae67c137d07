"""What the bits depend on: pinned threads, and what a checkpoint says about the machine it was written on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fleet
from fleet.errors import OptionWarning
from fleet.strategies.reproducible.same_kernels import differences, kernels_of, pin_kernels, warn_of_other_kernels
from tests.helpers.workers import run_workers
from tests.strategies.reproducible.turns import start, turns

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3])
def test_one_process_computes_with_the_threads_of_the_option(threads: int) -> None:
    """Acceptance 4: unpinned threads fail here."""
    torch.set_num_threads(2)
    start(2, reproducible_configs={"logical_workers": 2, "threads": threads})
    assert torch.get_num_threads() == threads
    assert turns().kernels["threads"] == f"{threads}"
    fleet.fleet._instance()._close()
    assert torch.get_num_threads() == 2


def threads_of(rank: int, world_size: int) -> tuple[int, int, int]:
    """Returns the threads before, in and after a job whose workers begin with other numbers of them."""
    torch.set_num_threads(2 + rank)
    start(world_size)
    pinned = torch.get_num_threads()
    fleet.fleet._instance()._close()
    return 2 + rank, pinned, torch.get_num_threads()


def test_several_processes_compute_with_the_threads_of_the_option() -> None:
    """Acceptance 4: unpinned threads fail here."""
    assert run_workers(threads_of, 2, backend=None) == [(2, 1, 2), (3, 1, 3)]


def test_the_description_names_what_must_stay_equal() -> None:
    found = kernels_of(CPU)
    assert found.keys() == {"processor", "instructions", "torch", "threads", "device"}
    assert found["torch"] == torch.__version__
    assert found["device"] == "cpu"
    assert all(isinstance(value, str) and value for value in found.values())


def test_a_machine_without_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise OSError

    monkeypatch.setattr("builtins.open", missing)
    found = kernels_of(CPU)
    monkeypatch.undo()
    assert found["processor"]


def test_what_differs_is_said_in_words() -> None:
    assert differences({"torch": "1", "threads": "1"}, {"torch": "1", "threads": "1"}) == ""
    said = differences({"torch": "1", "gpu": "A"}, {"torch": "2"})
    assert said == "gpu 'A' then and None now; torch '1' then and '2' now"


def test_other_kernels_are_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_kernels({"torch": "1"}, {"torch": "1"})
    with pytest.warns(OptionWarning, match="written with other kernels.*differs from the undisturbed one by rounding"):
        warn_of_other_kernels({"torch": "1"}, {"torch": "2"})


@pytest.mark.gpu
def test_a_gpu_computes_with_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        pin_kernels(1, torch.device("cuda", 0))
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert {"gpu", "cuda"} <= kernels_of(torch.device("cuda", 0)).keys()
    finally:
        torch.use_deterministic_algorithms(False)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
