"""The Fleet scripts of the GPT example: the losses of plain torch on every mesh, and a script close to its own."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.examples.gpt.example import EXAMPLE, TINY, command, example_module, launched, only_this_example
from tests.examples.scripts import history, train
from tests.helpers.workers import run_workers

HYBRID, PLAN = "train_fleet_hybrid", "train_fleet_plan"
STEPS = ("--steps", "5", "--sample-bytes", "12")
# Beside the layers: the mesh, the two wrappers, train_batch, the share of the rows, and the whole state.
MOST_CHANGED_LINES = 60


def run_script(name: str, folder: Path, label: str, *arguments: str) -> None:
    """Runs a script in this process; its history lands in ``folder``."""
    with only_this_example():
        script = example_module(name)
        sys.argv = [name, *TINY, *STEPS, *arguments, "--history", str(folder / label)]
        script.main()


def run_meshes(rank: int, world_size: int, folder: str, meshes: list[str]) -> None:
    """Trains on one mesh after the other."""
    for mesh in meshes:
        script, same = (PLAN, ()) if mesh.startswith("plan") else (HYBRID, ("--same-start",))
        config = str(EXAMPLE / "configs" / f"{mesh}.yaml")
        run_script(script, Path(folder), mesh, "--strategy", config, *same)


def check_meshes(folder: Path, meshes: dict[int, list[str]]) -> None:
    """Raises AssertionError unless each mesh, by its number of workers, has the losses of plain torch."""
    lines = train(command("train_torch.py", *TINY, *STEPS, "--history", "torch"), folder)
    assert lines.splitlines()[-1].startswith("The statement")
    expected = [record["loss"] for record in history(folder / "torch")]
    assert expected[-1] < expected[0] - 0.05
    for num_workers, names in meshes.items():
        run_workers(run_meshes, num_workers, str(folder), names, backend=None)
        for name in names:
            records = history(folder / name)
            assert [record["loss"] for record in records] == pytest.approx(expected, abs=1e-5), name
            assert {record["workers"] for record in records} == {num_workers}


def test_a_mesh_has_the_losses_of_plain_torch(tmp_path: Path) -> None:
    """Issue 12, 2 and 3: stages of divided layers, and the plain model cut by a plan."""
    check_meshes(tmp_path, {4: ["mp2_pp2", "plan_dp2_mp2"]})


@pytest.mark.slow
def test_every_mesh_has_the_losses_of_plain_torch(tmp_path: Path) -> None:
    """Issue 12, acceptance 1: the example's strategy files but the one for 8 workers."""
    four = ["dp2_mp2", "dp2_pp2", "sharding2_mp2", "sharding2_pp2"]
    check_meshes(tmp_path, {2: ["dp2", "mp2", "pp2", "plan_mp2"], 4: four})


@pytest.mark.slow
def test_the_demo_learns_and_is_drawn(tmp_path: Path) -> None:
    """Issue 12, 3: 4 processes, pp 2 x mp 2: falling loss, a sample, tokens per second and per worker, the plot."""
    train(launched("train_fleet_hybrid.py", 4, "mp2_pp2", "--steps", "60", "--history", "h"), tmp_path, limit_s=240)
    log = (tmp_path / "log" / "workerlog.0").read_text()
    records = history(tmp_path / "h")
    assert np.mean([r["loss"] for r in records[-5:]]) < 0.65 * records[0]["loss"]
    assert re.search(r"^\[Step 60/60\] loss: \d\.\d{5}, \d+ tokens/s, \d+ per worker$", log, re.MULTILINE)
    assert len(log[log.index("The statement") :]) > 150
    train(command("plot.py", "gpt.png", "h"), tmp_path)
    with Image.open(tmp_path / "gpt.png") as picture:
        assert picture.width > 1000


def changed_lines(new: str) -> list[str]:
    """Returns the lines of ``diff`` between the plain script and another that start with ``-`` or ``+``."""
    texts = [(EXAMPLE / name).read_text().splitlines() for name in ("train_torch.py", f"{new}.py")]
    return [line for line in difflib.unified_diff(*texts, n=0) if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_the_scripts_are_the_torch_script_and_a_few_lines() -> None:
    """Issue 12, 3: the diff is the tutorial; with a plan, model, loss and loop stay."""
    hybrid, plan = changed_lines(HYBRID), changed_lines(PLAN)
    assert 0 < len(plan) <= 24
    assert "-            loss.backward()" not in plan
    assert len(hybrid) <= MOST_CHANGED_LINES
    added = "\n".join(hybrid)
    for name in ("ColumnParallelLinear", "PipelineLayer", "LayerDesc", "model.train_batch(", "fleet.data_rank()"):
        assert name in added


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_shows_the_diff_and_knows_every_option_and_file(name: str) -> None:
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    shown = text.split("```diff\n")[1].split("\n```")[0]
    assert shown.splitlines() == changed_lines(HYBRID)
    scripts = "".join(path.read_text() for path in [*EXAMPLE.glob("train_*.py"), EXAMPLE / "options.py"])
    options = set(re.findall(r'add(?:_argument)?\(\s*"(--[a-z-]+)"', scripts))
    assert len(options) > 14
    assert {option for option in options if f"`{option}`" not in text} == set()
    assert {path.stem for path in EXAMPLE.glob("configs/*.yaml") if f"`{path.stem}`" not in text} == set()
