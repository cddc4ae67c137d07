"""The benchmark for a GPU runs without one in tiny sizes, and what it computes from times and kernels is right."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from types import ModuleType

import pytest

from tests.examples.scripts import environment
from tests.helpers.sources import ROOT
from tests.test_readme import read

BENCHMARK = ROOT / "benchmarks" / "gpu.py"


def module(name: str) -> ModuleType:
    """Returns a module of the benchmarks, which import each other from their own folder."""
    sys.path.insert(0, str(BENCHMARK.parent))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARK.parent))


def test_idle_is_the_time_that_no_kernel_covers() -> None:
    gaps = module("_gpu_steps").gaps
    assert gaps([]) is None
    assert gaps([(0.0, 10.0)]) == 0.0
    assert gaps([(8.0, 10.0), (0.0, 2.0), (1.0, 4.0), (1.0, 2.0)]) == pytest.approx(0.4)


def test_a_row_compares_speeds_and_not_times() -> None:
    found = {
        "seconds": {"torch": [2.0, 2.0], "fleet": [4.0, 2.0]},
        "per_step": 600,
        "peak_bytes": {"torch": 2_000_000_000, "fleet": 3_000_000_000},
        "idle": {"torch": 0.25, "fleet": None},
    }
    row = module("gpu").row_of("gpt", "tokens/s", found)
    assert row == ["gpt", "300 tokens/s", "200 tokens/s", "0.750 (0.500-1.000)", "3.00 GB / 2.00 GB", "no GPU / 25.0%"]


def test_the_start_of_a_job_does_not_count() -> None:
    times = [{"name": "time/step_ms", "value": value} for value in ("900", "10", "30", "20")]
    others = [{"name": "loss", "value": "1.5"}, {"name": "rate/samples_per_s", "value": "2000"}]
    rows = module("gpu").part_rows([*times, *others])
    assert rows == [["rate/samples_per_s", "2,000.0"], ["time/step_ms", "20.0"]]


def test_the_cases_are_those_that_the_steps_know_and_fit_the_run() -> None:
    gpu, steps = module("gpu"), module("_gpu_steps")
    assert gpu.CASES.keys() == steps.CASES.keys()
    assert sum(limit_s for _, limit_s in gpu.CASES.values()) < 60 * 8
    assert module("_gpu_steps").FULL.vocab_size == 50304


def test_the_page_says_that_nothing_was_measured() -> None:
    assert "## One GPU\n\nNo performance was measured on any GPU yet." in read("docs/benchmarks.md")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["resnet", "gpt", "gpt recompute", "wide & deep"])
def test_each_case_runs_in_tiny_sizes(case: str) -> None:
    """Not to_static, which needs a C++ compiler without a GPU."""
    command = [sys.executable, str(BENCHMARK), "--try", "--only", case]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stdout
    pattern = r"\| rate/samples_per_s \| [\d,.]+ \|" if case == "wide & deep" else rf"\| {case} \| [\d,]+ \w+/s \|"
    assert re.search(pattern, done.stdout), done.stdout
