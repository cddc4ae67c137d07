"""The plain torch script, and how far the Fleet script is from it."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLE, TINY, command, history, train

# The three changes of Fleet, the sampler and the guard of rank 0.
MOST_CHANGED_LINES = 28


def changed_lines(old: str, new: str) -> list[str]:
    """Returns the lines of ``diff`` between two scripts that start with ``-`` or ``+``."""
    texts = [(EXAMPLE / name).read_text().splitlines() for name in (old, new)]
    return [line for line in difflib.unified_diff(*texts, n=0) if line[0] in "+-" and line[:3] not in ("+++", "---")]


def test_the_fleet_script_is_the_torch_script_and_a_few_lines() -> None:
    """002-01: what has to change in a script that exists."""
    lines = changed_lines("train_torch.py", "train_fleet_dygraph.py")
    assert 0 < len(lines) <= MOST_CHANGED_LINES, "\n".join(lines)
    added = "\n".join(line for line in lines if line.startswith("+"))
    for call in ("from fleet import fleet", "fleet.init(", "fleet.distributed_optimizer(", "fleet.distributed_model("):
        assert call in added
    # 002-06: which images a process sees stands in the script, not in a wrapper.
    assert "DistributedSampler(train, world_size, rank" in added
    assert "sampler.set_epoch(epoch)" in added


def test_the_training_loop_is_untouched() -> None:
    loops = []
    for name in ("train_torch.py", "train_fleet_dygraph.py"):
        text = (EXAMPLE / name).read_text()
        loops.append(text[text.index("def train_epoch") : text.index("if __name__")])
    assert loops[0] == loops[1]
    assert "loss.backward()" in loops[0]


@pytest.mark.slow
def test_a_short_run_lowers_the_loss(tmp_path: Path) -> None:
    output = train(command("train_torch.py", *TINY, "--epochs", "4", "--history", "h.jsonl"), tmp_path)
    records = history(tmp_path / "h.jsonl")
    assert [record["epoch"] for record in records] == [0, 1, 2, 3]
    assert records[-1]["loss"] < 0.6 * records[0]["loss"]
    assert records[-1]["acc1"] > 0.5
    assert {record["images"] for record in records} == {1408}
    assert "[Epoch 0, batch 0] loss: " in output
    assert output.splitlines()[-1] == f"Test accuracy: {records[-1]['test_acc1']:.5f} on 359 images"


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_diff_in_the_readme_is_the_real_one(name: str) -> None:
    shown = (EXAMPLE / name).read_text(encoding="utf-8").split("```diff\n")[1].split("\n```")[0]
    assert shown.splitlines() == changed_lines("train_torch.py", "train_fleet_dygraph.py")


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_knows_every_option(name: str) -> None:
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    scripts = "".join(path.read_text() for path in [*EXAMPLE.glob("train_*.py"), EXAMPLE / "options.py"])
    options = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', scripts))
    assert len(options) > 12
    assert {option for option in options if f"`{option}`" not in text} == set()
