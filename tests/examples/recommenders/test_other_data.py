"""Data that is no simulated shop: what a model can train on is trained on, and what it cannot is refused before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.recommenders.example import EXAMPLE, example_module, only_this_example
from tests.examples.recommenders.small_models import metrics
from tests.examples.recommenders.test_movielens import write_format
from tests.examples.wide_and_deep.example import write_criteo

options = example_module("options")
script = example_module("train")
CONFIGS = EXAMPLE / "configs"


def trained(*words: str) -> None:
    """Trains in plain torch, in this process."""
    args = options.parse_options("", [*words, "--torch", "--batch-size", "4", "--max-batches", "3"])
    with only_this_example():
        script.train_alone(args, options.read_settings(args))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = script.open_data
    monkeypatch.setattr(script, "open_data", lambda source: opened(source, tmp_path / "cache"))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", sorted(options.NAMES))
def test_every_model_trains_on_movielens(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained("--model", name, "--data", str(write_format(tmp_path / "ml", "ratings.dat")), "--workers", "1")
    assert {"model", "popularity"} == metrics(capsys.readouterr().out)["auc_click"].keys()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", ["deepfm", "dcn"])
def test_the_columns_of_criteo_are_fields(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_criteo(tmp_path / "part-0", 60)
    trained("--model", name, "--data", str(path), "--config", str(CONFIGS / f"{name}_criteo.yaml"))
    assert metrics(capsys.readouterr().out)["auc_click"].keys() == {"model"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_the_slots_of_the_flights_are_fields(capsys: pytest.CaptureFixture[str]) -> None:
    trained("--model", "dcn", "--data", "flights", "--config", str(CONFIGS / "dcn_flights.yaml"))
    assert metrics(capsys.readouterr().out)["auc_click"].keys() == {"model"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deepfm", r"takes the columns \['user', 'item', .*'price'\].*It has \['C1', .*name fields and numbers"),
        ("esmm", r"takes the columns \['user', .*'purchase'\].*deepfm and dcn take the fields"),
        ("dssm", r"takes the columns \['user', 'age', 'history', 'item'"),
        ("word2vec", r"takes the columns \['history', 'item'\]"),
    ],
)
def test_a_model_of_other_columns_is_refused(name: str, message: str, tmp_path: Path) -> None:
    path = write_criteo(tmp_path / "part-0", 20)
    with pytest.raises(SystemExit, match=rf"^--data \S+part-0: {name} {message}"):
        trained("--model", name, "--data", str(path))


def test_a_folder_without_sessions_is_refused(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "impressions").symlink_to(folder / "impressions")
    with pytest.raises(SystemExit, match=r"word2vec takes \['sessions', 'items.parquet', 'shop.json'\]"):
        trained("--model", "word2vec", "--data", str(own))
