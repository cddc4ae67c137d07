"""The script: plain torch and servers train on the same samples, in each mode, and what is saved is served."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import fleet
from tests.examples.recommenders.example import EXAMPLE, example_module, only_this_example
from tests.examples.recommenders.small_models import alone, metrics, served
from tests.examples.scripts import train

cli = example_module("options")
feeds = example_module("feeds")
models = example_module("models")
script = example_module("train")
NAMES = sorted(models.MODELS)
LIMIT_S = 240.0


def options(folder: Path, name: str, *more: str) -> tuple[str, ...]:
    return ("--data", str(folder), "--model", name, "--max-batches", "40", "--epochs", "1", *more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["din", "dssm", "word2vec", "sasrec"])
def test_two_workers_reach_what_plain_torch_does(folder: Path, tmp_path: Path, name: str) -> None:
    """Issue 43: the same samples, and the same AUC to 1e-3; here it is the same to five digits."""
    given = options(folder, name, "--history", str(tmp_path / "h.jsonl"))
    local = metrics(train(alone(*given), tmp_path, LIMIT_S))
    found = metrics(train(served(*given), tmp_path, LIMIT_S))
    for metric, values in local.items():
        assert found[metric] == pytest.approx(values, abs=1e-3 if metric.startswith("recall") else 2e-5)
    records = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert [(record["model"], record["mode"]) for record in records] == [(name, "torch"), (name, "sync")]
    assert records[0]["steps"] == records[1]["steps"]
    assert {metric: records[1][metric] for metric in found} == found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_plain_torch_adds_the_losses_of_geo(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for mode, lr, table_lr in (("geo", 0.1, 1.0), ("sync", 0.2, 2.0), ("sync", 0.1, 1.0)):
        path = tmp_path / f"{mode}-{lr}.yaml"
        path.write_text(
            f"model: {{}}\nbatch_size: 64\nepochs: 1\noptimizer: {{name: sgd, lr: {lr}, table_lr: {table_lr}}}\n"
        )
        words = ["--torch", *options(folder, "deepfm", "--mode", mode, "--config", str(path))]
        args = cli.parse_options("", words)
        with only_this_example():
            script.train_alone(args, cli.read_settings(args))
        found.append(metrics(capsys.readouterr().out)["auc_click"]["model"])
    assert found[0] == pytest.approx(found[1], abs=2e-5)
    assert found[0] != pytest.approx(found[2], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "geo", "hybrid"])
def test_each_mode_ranks_better_than_popularity(folder: Path, tmp_path: Path, mode: str) -> None:
    given = ("--data", str(folder), "--model", "deepfm", "--mode", mode)
    output = train(served(*given), tmp_path, LIMIT_S)
    assert "no longer has an effect" not in output
    found = metrics(output)["auc_click"]
    assert found["popularity"] < found["model"] < found["best"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["din", "dssm"])
def test_what_is_saved_is_served(folder: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    found = metrics(train(served(*options(folder, name, "--save", str(model))), tmp_path, LIMIT_S))["auc_click"]
    batch = next(iter(feeds.held_out(folder, (*models.DIN.INPUTS, *models.DSSM.USER_INPUTS))))
    reader = fleet.ps.Reader(model)
    try:
        if name == "din":
            given = {column: batch[column] for column in models.DIN.INPUTS}
            scores = fleet.ps.Predictor(model, reader)(given)["click"]
        else:
            sides = {"user": models.DSSM.USER_INPUTS, "item": models.DSSM.ITEM_INPUTS}
            vectors = {
                side: fleet.ps.Predictor(model / side, reader)({column: batch[column] for column in columns})
                for side, columns in sides.items()
            }
            scores = (vectors["user"] * vectors["item"]).sum(1)
    finally:
        reader.close()
    stat = fleet.metrics.StatAuc()
    fleet.init(is_collective=True, log_level="ERROR")
    stat.update(torch.sigmoid(scores), batch["click"])
    assert stat.value() == pytest.approx(found["model"], abs=0.05)  # of the first 2048 samples


@pytest.mark.slow
@pytest.mark.parametrize("name", ["din", "deepfm"])
def test_bounded_tables_train(folder: Path, tmp_path: Path, name: str) -> None:
    """Admission, eviction and an accessor, as the configuration for production sets them."""
    config = EXAMPLE / "configs" / f"{name}_production.yaml"
    found = metrics(train(served(*options(folder, name, "--config", str(config))), tmp_path, LIMIT_S))
    assert found["auc_click"]["model"] > 0.55


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_shows_every_option_and_model(name: str) -> None:
    text = (EXAMPLE / name).read_text(encoding="utf-8")
    found = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (EXAMPLE / "options.py").read_text()))
    assert len(found) > 8
    assert {option for option in found if f"`{option}" not in text} == set()
    assert {model for model in NAMES if f"`{model}`" not in text} == set()
