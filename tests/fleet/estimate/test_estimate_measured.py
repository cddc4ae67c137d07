"""``fleet.estimate_memory`` against real runs (issue 3): within 15 % of the measured peak for the ResNets.

On the CPU the peak is the profiler's: torch's allocator reports every allocation to it, those inside operations
included, so the measurement shares nothing with the estimate. On a GPU it is ``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.sampled import sampled
from tests.helpers.sources import ROOT

CASES = ["plain", "recompute", "amp", "recompute and amp", "gradient_merge"]
SHARED = ["data_parallel", "fp16_allreduce", "dgc", "localsgd", "reproducible", "sharding 1"]
DIVIDED = ["sharding 2", "sharding 3"]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the benchmark that measures and estimates."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    for name in ("memory", "model", "_table"):
        monkeypatch.setitem(sys.modules, name, sys)  # so that it is taken out again afterwards
        del sys.modules[name]
    module = importlib.import_module("memory")
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / "benchmarks"
    return module


def test_the_cases_are_those_of_the_benchmark(memory: Any) -> None:
    assert list(memory.CASES) == CASES + SHARED + DIVIDED


@pytest.mark.parametrize("name", ["plain"])
def test_near_a_real_run(memory: Any, name: str) -> None:
    """The quick one of them: ResNet-18 on small images."""
    compare(memory, name, 18, batch_size=4, size=64)


@pytest.mark.parametrize("name", CASES + SHARED)
@pytest.mark.parametrize("depth", sampled([18, 50], [18]))
def test_within_15_percent(memory: Any, name: str, depth: int) -> None:
    """Every case, on images large enough that activations count; where workers exchange, as for divided models."""
    compare(memory, name, depth, batch_size=8, size=96, measurements=3 if name in SHARED else 1)


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("depth", sampled([18, 50], [18]))
def test_within_15_percent_of_a_divided_model(memory: Any, name: str, depth: int) -> None:
    """Parts, units that are gathered in turn, and reductions.

    How long gloo's own threads keep their copies is a matter of luck, and the peak of ResNet-18 is 159 to 190 MB: one
    of three runs has to come near.
    """
    compare(memory, name, depth, batch_size=8, size=96, measurements=3)


def compare(memory: Any, name: str, depth: int, batch_size: int, size: int, measurements: int = 1) -> None:
    estimate = memory.estimated_bytes(name, depth, batch_size, size)
    measured: list[int] = []
    while len(measured) < measurements:
        measured.append(memory.measured_bytes(name, depth, batch_size, size, timeout_s=120))
        if abs(estimate / measured[-1] - 1) < 0.15:
            return
    pytest.fail(f"{name}: the estimate is {estimate}, the measured peaks are {measured}")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("depth", [18, 50])
def test_within_15_percent_on_a_gpu(memory: Any, name: str, depth: int) -> None:
    """The same on one GPU, on images of the usual size, with the GPU's own operations."""
    assert torch.cuda.is_available()
    compare(memory, name, depth, batch_size=32, size=224)
