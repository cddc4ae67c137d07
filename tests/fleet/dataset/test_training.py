"""train_from_dataset: a step for every batch, log lines, dumps, sums over batches and workers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from fleet.dataset.batch import Batch
from fleet.dataset.in_memory import InMemoryDataset
from fleet.dataset.slots import Slot
from fleet.dataset.training import Dump, infer_from_dataset, train_from_dataset
from fleet.errors import ConfigError
from fleet.facade import Fleet
from tests.helpers.fleets import own_fleet
from tests.helpers.workers import run_workers

SLOTS = [Slot("words", lod_level=1), Slot("x", (-1, 2), "float32")]


def dataset(folder: Path, count: int, batch_size: int = 2) -> InMemoryDataset:
    """Returns ``count`` samples with ids, of which sample i has x = (i, 1)."""
    path = folder / f"data-{count}"
    path.write_text("".join(f"1 id{i} {i % 2 + 1} {'7 ' * (i % 2 + 1)} 2 {i} 1\n" for i in range(count)))
    made = InMemoryDataset()
    made.init(use_var=SLOTS, batch_size=batch_size, parse_ins_id=True)
    made.set_filelist([str(path)])
    made.load_into_memory()
    return made


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Returns a Fleet that nothing is left of afterwards."""
    made = own_fleet(monkeypatch)
    for name in ("init", "session"):
        monkeypatch.delitem(vars(fleet), name, raising=False)
    return made


def start(running: Fleet, **trainer: Any) -> None:
    """Starts a single process with these ``trainer_desc_configs``."""
    strategy = fleet.DistributedStrategy()
    strategy.trainer_desc_configs = trainer
    running.init(is_collective=True, strategy=strategy)


def test_training_is_the_users_step_on_every_batch(tmp_path: Path) -> None:
    """B.7, consume: the same as the loop written out; without fleet.init() too."""
    results = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def step(batch: Batch, model: Any = model, optimizer: Any = optimizer) -> None:
            model(batch["x"]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        data = dataset(tmp_path, 5)
        if by_hand:
            for batch in data:
                step(batch)
        else:
            assert train_from_dataset(step, data) == {}
        results.append(model.weight.tolist())
    assert results[0] == results[1]


def test_inference_takes_no_gradient(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    seen = []
    infer_from_dataset(lambda batch: seen.append(model(batch["x"]).requires_grad), dataset(tmp_path, 3))  # type: ignore[func-returns-value, arg-type]
    train_from_dataset(lambda batch: seen.append(model(batch["x"]).requires_grad), dataset(tmp_path, 3))  # type: ignore[func-returns-value, arg-type]
    assert seen == [False, False, True, True]


def test_outputs_are_logged_every_so_often(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = dataset(tmp_path, 9, batch_size=1)
    with caplog.at_level(logging.INFO, logger="FLEET"):
        train_from_dataset(lambda batch: {"x": batch["x"], "two": 2}, data, fetch_list=["x", "two"], print_period=4)
    assert [r.getMessage() for r in caplog.records] == ["batch 4: x=2, two=2", "batch 8: x=4, two=2"]


def test_fields_and_parameters_are_dumped(tmp_path: Path, running: Fleet) -> None:
    """A.2, trainer_desc_configs: dump_fields_path, dump_fields, dump_param."""
    folder = tmp_path / "made" / "dump"
    start(running, dump_fields_path=str(folder), dump_fields=["double", "words"], dump_param=["bias"])
    model = running.distributed_model(torch.nn.Linear(2, 1))

    def step(batch: Batch) -> dict[str, Any]:
        model.module.bias.data.fill_(0.25)
        return {"double": batch["x"] * 2}  # type: ignore[operator]

    train_from_dataset(step, dataset(tmp_path, 3))
    assert (folder / "part-000").read_text().splitlines() == [
        "id0\t\tdouble:2:0:2\twords:1:7",
        "id1\t\tdouble:2:2:2\twords:2:7:7",
        "(0,bias):0.25",
        "id2\t\tdouble:2:4:2\twords:1:7",
        "(1,bias):0.25",
    ]


@pytest.mark.parametrize(
    ("trainer", "rule"),
    [
        ({"dump_fields": ["x"]}, "vice versa"),
        ({"dump_fields_path": "PATH"}, "vice versa"),
        ({"dump_fields_path": "PATH", "dump_param": ["weight"]}, "names 'weight'; the parameters are"),
        ({"dump_fields_path": "PATH", "dump_fields": ["y"]}, "names 'y'; the step returns"),
        ({"dump_fields_path": "PATH", "dump_fields": ["mean"]}, "0 rows in a batch of 2 samples"),
        ({"stat_var_names": ["loss"]}, "'loss' is requested"),
    ],
)
def test_what_cannot_be_dumped(tmp_path: Path, running: Fleet, trainer: dict[str, Any], rule: str) -> None:
    start(running, **{name: str(tmp_path) if value == "PATH" else value for name, value in trainer.items()})
    with pytest.raises(ConfigError, match=rule):
        train_from_dataset(lambda batch: {"mean": 0.5}, dataset(tmp_path, 3))


def test_arguments_are_checked(tmp_path: Path) -> None:
    data = dataset(tmp_path, 2)
    for arguments, rule in [
        ({"step": 3}, "is a function"),
        ({"step": lambda batch: None, "print_period": 0}, "at least 1"),
        ({"step": lambda batch: None, "fetch_list": "loss"}, "list of names"),
        ({"step": lambda batch: None, "fetch_list": ["loss"]}, "'loss' is requested"),
        ({"step": lambda batch: 3}, "returned int"),
        ({"step": lambda batch: {"loss": "low"}, "fetch_list": ["loss"], "print_period": 1}, "as str"),
    ]:
        with pytest.raises(ConfigError, match=rule):
            train_from_dataset(dataset=data, **arguments)  # type: ignore[arg-type]
    with Dump("", [], {}, 0) as nothing:
        nothing.write(0, next(iter(data)), {})


def _sums(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    strategy = fleet.DistributedStrategy()
    strategy.trainer_desc_configs = {"stat_var_names": ["total", "pair"]}
    fleet.init(is_collective=True, strategy=strategy)
    data = dataset(Path(folder), 5 * rank)  # worker 0 has no batch at all
    found = train_from_dataset(
        lambda batch: {"total": batch["x"].sum(), "pair": batch["x"].sum(0), "other": 1},  # type: ignore[union-attr]
        data,
    )
    return {name: np.asarray(value) for name, value in found.items()}


def test_sums_go_over_batches_and_workers(tmp_path: Path) -> None:
    """A.2, trainer_desc_configs: stat_var_names."""
    for found in run_workers(_sums, 2, str(tmp_path), backend=None):
        assert set(found) == {"total", "pair"}
        assert found["total"] == 15.0
        assert found["pair"].tolist() == [10.0, 5.0]
