"""Pipelines that are cut from a plain model: their losses and whole parameters are compared, by the model's names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.verifying import verify

SCRIPT = Path(__file__).parent / "clean" / "split_pipeline.py"
_WRONG = """if fleet.worker_index() == 1:
    model.get_parameter("blocks.3.up.weight").register_hook(lambda gradient: 1.5 * gradient)
sampler = """


def changed(folder: Path, old: str, new: str) -> Path:
    """Returns the script with ``new`` in place of ``old``."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count(old) == 1
    made = folder / "train.py"
    made.write_text(text.replace(old, new), encoding="utf-8")
    return made


@pytest.mark.slow
def test_two_copies_of_a_pipeline_are_equal(tmp_path: Path) -> None:
    """One process takes micro-batches of the rows of both copies."""
    report = verify(SCRIPT, tmp_path, "--nproc_per_node", "4", "--steps", "3")
    assert (report["outcome"], report["findings"]) == ("equal", []), report["notes"]
    assert len(report["per_step"]) == 3
    for row in report["per_step"]:
        assert row["parameters"] is not None
        assert row["loss_many"] == pytest.approx(row["loss_one"], rel=1e-6)


@pytest.mark.slow
def test_a_wrong_gradient_of_the_last_stage_is_found_under_the_name_of_the_model(tmp_path: Path) -> None:
    report = verify(changed(tmp_path, "sampler = ", _WRONG), tmp_path, "--steps", "3")
    assert report["outcome"] == "differs", report["notes"]
    assert (report["findings"][0]["step"], report["findings"][0]["tensor"]) == (1, "blocks.3.up.weight")


@pytest.mark.slow
def test_a_wrong_loss_of_the_last_stage_is_found(tmp_path: Path) -> None:
    wrong = "return (1 + fleet.worker_index()) * nn.functional.cross_entropy"
    report = verify(changed(tmp_path, "return nn.functional.cross_entropy", wrong), tmp_path, "--steps", "2")
    assert report["outcome"] == "differs", report["notes"]
    first = report["findings"][0]
    assert (first["step"], first["tensor"], first["difference"]) == (1, "loss", pytest.approx(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("call", ["nn.functional.dropout(self.norm(h + first), 0.5, self.training)", "self.drop(h)"])
def test_a_model_with_dropout_is_not_compared(tmp_path: Path, call: str) -> None:
    script = changed(tmp_path, "self.norm(h + first)", call)
    text = script.read_text(encoding="utf-8").replace(
        "self.norm = ", "self.drop = nn.Dropout(0.5)\n        self.norm = "
    )
    script.write_text(text, encoding="utf-8")
    report = verify(script, tmp_path, "--steps", "2")
    assert report["outcome"] == "not_comparable", report["findings"]
    assert report["notes"][0].startswith("The model has dropout and is divided among the workers")
