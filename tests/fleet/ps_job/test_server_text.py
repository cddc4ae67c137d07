"""save_persistables(text=True): rows as lines of text (D.8, 003-08, issue 9, 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.errors import ConfigError
from fleet.facade import Fleet
from tests.fleet.ps_job.test_server_job import make_adagrad, rows_of, served, strategy
from tests.helpers.served import batches, run_job, train


def read(folder: Path, columns: int = 4) -> dict[int, list[float]]:
    """Returns the weights as another program reads them: the key, five statistics, the first weight, its state, ..."""
    found = {}
    for path in sorted(folder.glob("part-*-00000")):
        for line in path.read_text().splitlines():
            numbers = line.split()
            assert len(numbers) == 6 + 2 * columns  # Adagrad's state is one number for each weight
            weights = [numbers[6], *numbers[8 : 8 + columns - 1]]
            found[int(numbers[0])] = [float(number) for number in weights]
    return found


def test_rows_as_text_are_read_by_others_and_load_equal(tmp_path: Path) -> None:
    """Two servers write a part each; together they are the table, and training goes on from them on one server."""

    def work(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("sync"), make_adagrad, seed=rank)
        data = batches(6, rank, 2)
        train(model, optimizer, data[:3])
        own.save_persistables(tmp_path / "model")  # replaced by the text
        own.save_persistables(tmp_path / "model", text=True)
        rows = rows_of(model), model.words.weight.detach().clone()
        train(model, optimizer, data[3:])
        after = model.words.weight.detach().clone()
        own.stop_worker()
        return *rows, after

    def resume(own: Fleet, rank: int) -> Any:
        model, optimizer = served(own, strategy("sync"), make_adagrad, seed=7)
        own.load_model(tmp_path / "model")
        rows = rows_of(model), model.words.weight.detach().clone()
        train(model, optimizer, batches(6, rank, 2)[3:])
        after = model.words.weight.detach().clone()
        own.save_persistables(tmp_path / "model", text=True)  # fewer servers: nothing of the others is left
        own.stop_worker()
        return *rows, after

    (ads, words, after), _ = run_job(work, num_servers=2, num_workers=2, strategy=strategy("sync"))
    assert sorted(path.name for path in (tmp_path / "model" / "words").iterdir() if "part" in path.name)[:2] == [
        "part-000-00000",
        "part-001-00000",
    ]
    assert not list((tmp_path / "model" / "ads").glob("*.json"))
    for name, rows, step in (("ads", ads, 10**12), ("words", words, 1)):
        found = read(tmp_path / "model" / name)
        for key, values in found.items():
            assert torch.equal(torch.tensor(values), rows[key // step]), (name, key)
        assert found
    (one, other, then), _ = run_job(resume, num_workers=2, strategy=strategy("sync"))
    assert torch.equal(one, ads)
    assert torch.equal(other, words)
    assert torch.equal(then, after)
    assert [path.name for path in sorted((tmp_path / "model" / "words").glob("part-*-*"))] == ["part-000-00000"]


def test_text_has_every_row() -> None:
    """The modes choose rows by what a text save does not keep apart."""
    own = Fleet()
    for arguments in ({"mode": 1, "text": True}, {"text": "yes"}):
        with pytest.raises(ConfigError, match="mode 0"):
            own.save_persistables("model", **arguments)
