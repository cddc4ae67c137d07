"""The command line and the configurations: what is set is used, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from tests.examples.recommenders.example import EXAMPLE, example_module

options = example_module("options")
tables = example_module("tables")
models = example_module("models")
CONFIGS = sorted((EXAMPLE / "configs").glob("*.yaml"))


def settings(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = options.read_settings(options.parse_options("", words))
    return found


@pytest.mark.parametrize("mode", ["sync", "geo"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_makes_its_model_and_optimizer(path: Path, mode: str) -> None:
    name = path.stem.partition("_")[0]
    found = settings("--model", name, "--config", str(path), "--mode", mode)
    made = tables.Tables(found["tables"], local=False)
    net = models.MODELS[name](made, **found["model"])
    made.check()
    groups = options.make_optimizer(found["optimizer"], net).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(net.parameters()))
    if mode == "geo" and not path.stem.endswith("_production"):  # these are for the modes that take Adagrad
        assert found["optimizer"]["name"] == "sgd"


def test_there_is_a_configuration_for_each_model() -> None:
    assert {path.stem for path in CONFIGS} >= set(options.NAMES) == set(models.MODELS)


def test_the_mode_and_the_command_line_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: {dim: 4}\nepochs: 2\nbatch_size: 8\noptimizer: {}\nmodes: {geo: {k_steps: 7, epochs: 3}}\n")
    given = ("--model", "deepfm", "--config", str(path))
    assert settings(*given)["epochs"] == 2
    assert settings(*given)["k_steps"] == 100
    geo = settings(*given, "--mode", "geo", "--batch-size", "16")
    assert (geo["k_steps"], geo["epochs"], geo["batch_size"]) == (7, 3, 16)


def test_unknown_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("model: {dim: 4}\nbatchsize: 8\n")
    with pytest.raises(SystemExit, match="'batchsize'"):
        settings("--model", "deepfm", "--config", str(path))


@pytest.mark.parametrize(("text", "message"), [(None, "No such file"), ("{", "cannot be read"), ("- 1\n", "but list")])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "own.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit, match=rf"(?s)--config '.*own.yaml'.*{message}.*takes a YAML file of settings"):
        settings("--model", "deepfm", "--config", str(path))


def test_workers_are_those_of_plain_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert options.parse_options("", ["--model", "din", "--torch", "--workers", "3"]).workers == 3
    assert options.parse_options("", ["--model", "din", "--torch"]).workers == 2
    with pytest.raises(SystemExit, match="2"):
        options.parse_options("", ["--model", "din", "--workers", "3"])
    assert "--workers goes with --torch: --worker_num of fleet.launch sets" in capsys.readouterr().err


def test_plain_torch_refuses_what_needs_servers() -> None:
    with pytest.raises(SystemExit, match="--save"):
        settings("--model", "deepfm", "--torch", "--save", "x")
    with pytest.raises(SystemExit, match="max_rows for table 'user'"):
        tables.Tables({"user": {"max_rows": 5}}, local=True)("user", 4)


def test_rows_have_a_rate_of_their_own() -> None:
    net = models.MODELS["din"](tables.Tables({}, local=False), dim=4)
    optimizer = options.make_optimizer({"name": "sgd", "lr": 0.1, "table_lr": 5.0}, net)
    rows, rest = optimizer.param_groups
    assert (rows["lr"], rest["lr"]) == (5.0, 0.1)
    assert len(rows["params"]) == 7
    assert isinstance(optimizer, torch.optim.SGD)


def test_settings_of_a_table_become_those_of_its_embedding() -> None:
    made = tables.Tables(
        {
            "all": {"initializer": ["normal", 0.0, 0.5]},
            "item": {"entry": ["CountFilterEntry", 3], "accessor": {"delete_threshold": 0.5}, "max_rows": 9},
        },
        local=False,
    )
    config = made("item", 4).table_config(fleet.ps.Rule("sgd"))
    assert config.entry == fleet.CountFilterEntry(3)
    assert config.accessor == fleet.ps.Accessor(delete_threshold=0.5)
    assert config.bounds.max_rows == 9
    assert config.initializer == made("user", 4).table_config(fleet.ps.Rule("sgd")).initializer


def test_rows_of_plain_torch_begin_as_those_of_servers() -> None:
    local = tables.LocalTable(4, capacity=5, initializer=fleet.ps.Initializer("normal", 0.0, 0.5))
    ids = torch.tensor([[7, -(2**62)], [7, 0]])
    rows = local(ids)
    served = fleet.SparseEmbedding(4, initializer=fleet.ps.Initializer("normal", 0.0, 0.5))
    torch.testing.assert_close(rows, served(ids), rtol=0, atol=0)
    rows.sum().backward()
    assert local.weight.grad is not None
    assert local.weight.grad.is_sparse
    with pytest.raises(ValueError, match="5 rows has no room for 6 ids"):
        local(torch.tensor([1, 2, 3]))
