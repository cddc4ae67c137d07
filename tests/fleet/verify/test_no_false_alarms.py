"""What is right is found equal: correct scripts, the examples, and every pair of strategies that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import fleet
from fleet.errors import ConfigError
from fleet.strategies import plan
from fleet.verify.paired_runs import Starter, VerifyRequest
from fleet.verify.run_comparison import _Judge
from tests.helpers.sampled import sampled
from tests.helpers.sources import ROOT
from tests.helpers.verifying import verify
from tests.strategies.test_training_contract import examples, fitted, pairs

FOLDER = Path("tests/fleet/verify")
CLEAN = sorted(path.relative_to(ROOT) for path in (ROOT / FOLDER / "clean").glob("*.py"))
# These are `slow`; the others are `long`.
PAIR_SAMPLE = {"amp+gradient_merge", "lamb+tensor_parallel"}

_TINY_IMAGES = ("--image-size", "7", "--width", "4", "--epochs", "2", "--max-batches", "3", "--batch-size", "8")
_TINY_TEXT = (
    "--hidden",
    "32",
    "--steps",
    "6",
    "--layers",
    "2",
    "--length",
    "16",
    "--batch-size",
    "8",
    "--sample-bytes",
    "0",
)
EXAMPLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "resnet": ("examples/resnet/train_fleet_dygraph.py", _TINY_IMAGES),
    "resnet_checkpoint": ("examples/resnet/train_fleet_dygraph_ckpt.py", (*_TINY_IMAGES, "--checkpoint", "c.pdparams")),
    "gpt_mp": ("examples/gpt/train_fleet_hybrid.py", (*_TINY_TEXT, "--strategy", "examples/gpt/configs/mp2.yaml")),
    "gpt_pp": ("examples/gpt/train_fleet_hybrid.py", (*_TINY_TEXT, "--strategy", "examples/gpt/configs/pp2.yaml")),
    "gpt_dp": ("examples/gpt/train_fleet_hybrid.py", (*_TINY_TEXT, "--strategy", "examples/gpt/configs/dp2.yaml")),
    "gpt_plan": ("examples/gpt/train_fleet_plan.py", (*_TINY_TEXT, "--strategy", "examples/gpt/configs/plan_mp2.yaml")),
}


def options_of(first: str, second: str) -> dict[str, Any]:
    """Returns the options of the contract tests for a pair, on two workers."""
    return fitted({**examples(first), **examples(second)}, 2)


def trains(first: str, second: str) -> bool:
    """Returns whether a pair is not refused."""
    strategy = fleet.DistributedStrategy()
    try:
        strategy.update(options_of(first, second))
        plan(strategy, 2)
    except ConfigError:
        return False
    return True


def assert_equal(report: dict[str, Any]) -> None:
    """Asserts that nothing differs, and that steps were compared."""
    assert report["outcome"] == "equal", (report["findings"], report["notes"])
    assert report["findings"] == []
    assert report["steps"] >= 2


@pytest.mark.parametrize("name", sampled([path.stem for path in CLEAN]))
def test_a_correct_script_is_equal(name: str, tmp_path: Path, starter: Starter) -> None:
    request = VerifyRequest(script=ROOT / FOLDER / "clean" / f"{name}.py", timeout_s=120)
    assert_equal(_Judge(request, tmp_path, starter).report().to_json())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replayed", "unseen", "said"),
    [
        ("torch.poisson(x.detach().abs())", "torch.rrelu(x, 0.1, 0.4, True)", "The model (Classifier) draws"),
        (
            "cross_entropy(model(x), y)",
            "cross_entropy(torch.dropout(model(x), 0.2, True), y)",
            "The training loop draws",
        ),
    ],
    ids=["in the model", "in the loss"],
)
def test_draws_that_are_not_replayed_accuse_nothing(replayed: str, unseen: str, said: str, tmp_path: Path) -> None:
    right = (ROOT / FOLDER / "clean/drawn_inside_torch.py").read_text(encoding="utf-8")
    assert right.count(replayed) == 1
    script = tmp_path / "train.py"
    script.write_text(right.replace(replayed, unseen), encoding="utf-8")
    report = verify(script, tmp_path)
    assert report["outcome"] == "not_comparable", report["findings"]
    assert report["notes"][0].startswith(said), report["notes"]
    assert "train.py:" in report["notes"][0]


@pytest.mark.parametrize("name", sampled(list(EXAMPLES), {"resnet"}))
def test_an_example_is_equal(name: str, tmp_path: Path) -> None:
    script, arguments = EXAMPLES[name]
    folders = {".yaml": ROOT, ".pdparams": tmp_path}
    given = [str(folders[Path(one).suffix] / one) if Path(one).suffix in folders else one for one in arguments]
    assert_equal(verify(Path(script), tmp_path, "--steps", "4", arguments=given))


@pytest.mark.parametrize("name", sampled(["+".join(pair) for pair in pairs()], PAIR_SAMPLE))
def test_a_pair_that_trains_is_equal(name: str, tmp_path: Path) -> None:
    first, second = name.split("+")
    if name not in PAIR_SAMPLE and not trains(first, second):
        pytest.skip("this pair is refused")
    file = tmp_path / "strategy.yaml"
    file.write_text(yaml.safe_dump(options_of(first, second)), encoding="utf-8")
    wants = {"lamb": "--adam", "pipeline": "--pipeline"}
    arguments = [wants[one] for one in (first, second) if one in wants]
    assert_equal(verify(FOLDER / "pair_training.py", tmp_path, "--strategy", str(file), arguments=arguments))
