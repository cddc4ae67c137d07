"""What the README says is refused, limited or absent is so, or carries its reason; its quick start does as it shows."""

from __future__ import annotations

import difflib
import os
import platform
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import fleet
from fleet import checkpoint
from fleet.errors import CheckpointError, ConfigError, OptionWarning, UnknownOptionError, UnsupportedOptionError
from fleet.options import DistributedStrategy
from tests.examples.scripts import environment
from tests.helpers.sources import ROOT
from tests.test_readme import READMES, fenced, read

QUICK_START = ROOT / "examples" / "quickstart"
TWO_WORKERS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

# ---- limits ----------------------------------------------------------------------------------------------------------


def windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process runs on Windows; several are refused."""
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    for name, value in TWO_WORKERS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedOptionError, match="distributed training runs on Linux"):
        fleet.init(is_collective=True)


def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test can show what nobody measured: the page of the benchmarks says on what it was made."""
    assert re.search(r"no GPU, and torch [\d.]+ on gloo", read("docs/benchmarks.md"))


def refused_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each option of docs/reference/options.md that says so raises, with the reason that its line gives."""
    lines = read("docs/reference/options.md")
    rows = re.findall(r"^\| `(\w+)` \| bool \| `False` \| [^|]* Refused: ([^|]*) \|$", lines, re.M)
    options = {name: reason for name, reason in rows if hasattr(DistributedStrategy(), name)}
    assert {"semi_auto", "auto_search", "heter_ccl_mode", "is_fl_ps_mode", "with_coordinator"} <= options.keys()
    for name, reason in options.items():
        strategy = DistributedStrategy()
        if isinstance(getattr(strategy, name), bool) and not re.match("write ", reason):
            setattr(strategy, name, True)
            assert f"{name} = True cannot be honoured: {reason}" in fleet.explain(strategy, world_size=2)


def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables on GPUs and workers of a second kind are refused when they are asked for."""
    for key, value in (("use_ps_gpu", 1), ("use_gpu_graph", 1), ("heter_worker_device_guard", "gpu")):
        strategy = DistributedStrategy()
        strategy.a_sync = True
        strategy.a_sync_configs = {key: value}
        assert f"a_sync_configs['{key}'] = {value!r} cannot be honoured" in fleet.explain(strategy, world_size=2)


def elastic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nodes are killed in network namespaces by these tests, which are slow."""
    for test in (
        "tests/launch/test_elastic_nodes.py::test_killed_node_and_its_replacement",
        "tests/launch/test_elastic_master.py::test_the_loss_of_the_node_with_the_store_ends_the_job",
        "tests/launch/membership/test_etcd_meeting.py::test_fixed_job_on_etcd",
    ):
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in read(path)


def paddle_programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file of a program is named and refused, and there is no call that makes one."""
    program = tmp_path / "model.pdmodel"
    program.write_bytes(b"\n\x04\x08\x00\x12\x03abc")
    with pytest.raises(CheckpointError, match=r"model\.pdmodel is no file of paddle\.save"):
        checkpoint.read_paddle(str(program))
    assert not hasattr(fleet, "static")


# What an item of the list begins with, and the check that it is true.
LIMITS: dict[str, Callable[[pytest.MonkeyPatch, Path], None]] = {
    "Linux only": windows,
    "No performance was measured on any GPU": gpus,
    'Options marked "Refused"': refused_options,
    "Tables of parameter servers lie in host memory or on disk": tables,
    "An elastic job survives the loss of any node only with etcd": elastic,
    "Of Paddle's files, parameters, optimizer states and tables are read": paddle_programs,
}


def test_every_limit_has_a_check() -> None:
    section = read("README.md").partition("\n## Limits\n")[2].partition("\n## ")[0]
    items = re.findall(r"^- (.*)$", section, re.MULTILINE)
    assert [[start for start in LIMITS if item.startswith(start)] for item in items] == [[start] for start in LIMITS]


@pytest.mark.parametrize("check", LIMITS.values(), ids=LIMITS)
def test_a_limit_is_true(
    check: Callable[[pytest.MonkeyPatch, Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check(monkeypatch, tmp_path)


# ---- the promise -----------------------------------------------------------------------------------------------------


def test_an_option_acts_or_is_refused_or_warns() -> None:
    """One of each; tests/strategies/test_walk_options.py walks all options and keys."""
    strategy = DistributedStrategy()
    with pytest.warns(OptionWarning, match="accepted and changes nothing: torch orders"):
        strategy.sync_nccl_allreduce = False
    strategy.gradient_merge = True
    strategy.semi_auto = True
    strategy.use_hierarchical_allreduce = True
    text = fleet.explain(strategy, world_size=1)
    assert "gradient_merge changes nothing: gradient_merge_configs['k_steps'] is 1" in text
    assert "use_hierarchical_allreduce changes nothing: all workers are in one group" in text
    assert "semi_auto = True cannot be honoured" in text


def test_what_the_second_reason_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Misspelt options, options that contradict each other, and two jobs of one worker in place of one job of two."""
    strategy = DistributedStrategy()
    with pytest.raises(UnknownOptionError, match="Did you mean 'gradient_merge'"):
        strategy.gradient_merg = True  # type: ignore[attr-defined]
    strategy.localsgd = True
    strategy.gradient_merge = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptionWarning)
        assert "'localsgd' and 'gradient_merge' cannot both be on" in fleet.explain(strategy, world_size=2)
    for name, value in TWO_WORKERS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="is_collective=True"):
        fleet.init()


# ---- the quick start -------------------------------------------------------------------------------------------------


def changed_lines() -> list[str]:
    """Returns the lines of code in which the scripts of the quick start differ."""
    texts = [(QUICK_START / name).read_text().splitlines()[1:] for name in ("train_torch.py", "train_fleet.py")]
    lines = list(difflib.unified_diff(*texts, n=0))[2:]
    return [line for line in lines if line[0] in "+-" and line[1:].strip()]


def test_the_quick_start_adds_eight_lines() -> None:
    lines = changed_lines()
    assert [line[0] for line in lines].count("+") == 8
    assert [line[0] for line in lines].count("-") == 1
    assert not re.search(r"lambda|\[[^\]]*:[^\]]*\]", "\n".join(lines))
    assert "DistributedDataParallel" not in (QUICK_START / "train_torch.py").read_text()
    for name in READMES:
        (shown,) = fenced(name, "diff")
        assert [line for line in shown.splitlines() if line.strip("+- ")] == lines


def run_quick_start(folder: Path, old: str, new: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs train_fleet.py with ``old`` replaced by ``new`` under ``python -m`` and a command, in a folder."""
    text = (QUICK_START / "train_fleet.py").read_text()
    assert text.count(old) == 1
    (folder / "train.py").write_text(text.replace(old, new))
    line = [sys.executable, "-m", *command, "train.py"]
    return subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


def shown(start: str) -> str:
    """Returns the block of text of the README that begins with ``start``."""
    (block,) = (body for body in fenced("README.md", "text") if body.startswith(start))
    return block


def form(text: str) -> str:
    """Returns a text without its numbers and names of scripts, which differ between machines."""
    return re.sub(r"\w+\.py", "SCRIPT", re.sub(r"\d[\d.e+-]*", "N", text))


@pytest.mark.slow
def test_the_quick_start_prints_what_is_shown(tmp_path: Path) -> None:
    done = run_quick_start(tmp_path, "import torch\n", "import torch\n", "fleet.launch", "--nproc_per_node=2")
    printed = done.stdout + done.stderr
    lines = shown("[2026").partition("]")[2].splitlines()
    assert done.returncode == 0, printed
    for line in lines:
        assert form(line) in form(printed)
    assert int(re.findall(r"(\d+) of 360", printed)[-1]) > 330


@pytest.mark.slow
def test_the_planted_mistake_is_found_as_shown(tmp_path: Path) -> None:
    planted = "cross_entropy(model(x), y, ignore_index=0)"
    assert all(f"`{planted}`" in read(name) for name in READMES)
    done = run_quick_start(tmp_path, "cross_entropy(model(x), y)", planted, "fleet", "verify")
    assert done.returncode == 1, done.stderr
    assert form(shown("DIFFERS")) in form(done.stdout)


@pytest.mark.slow
def test_a_call_around_the_wrapped_model_is_refused_as_shown(tmp_path: Path) -> None:
    assert all("`model.module(x)`" in read(name) for name in READMES)
    done = run_quick_start(tmp_path, "model(x), y", "model.module(x), y", "fleet.launch", "--nproc_per_node=2")
    assert done.returncode != 0
    assert shown("ConfigError").strip() in done.stdout + done.stderr


def test_the_picture_is_there_and_small() -> None:
    for name in READMES:
        (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", read(name))
        assert 10_000 < os.path.getsize(ROOT / picture) < 160_000
