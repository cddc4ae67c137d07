"""Lines and history of a pass."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import SequentialSampler, TensorDataset

from tests.examples.wide_and_deep.example import aucs, example_module, losses

report = example_module("report")
data = example_module("data")


def loader(samples: int) -> object:
    """Returns batches of two samples."""
    dataset = TensorDataset(torch.zeros(samples, 1), torch.zeros(samples, 1), torch.zeros(samples))
    return data.batches_of(dataset, SequentialSampler(dataset), 2, drop_last=True)


def test_a_pass_prints_its_mean_and_keeps_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """002-25: the line of a pass."""
    args = argparse.Namespace(epochs=2, max_batches=2, history=str(tmp_path / "a" / "h.jsonl"))
    made = report.Report(args)
    assert len([made.add_batch(torch.tensor(loss), n) for loss, n in ((1.0, 3), (2.0, 1))]) == 2
    made.end_pass(4)
    made.end_test(4, 0.75, 1.5)
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "TRAIN ---> pass: 4 loss: 1.250000"
    assert (losses(printed), aucs(printed)) == ([1.25], [0.75])
    record = json.loads((tmp_path / "a" / "h.jsonl").read_text())
    assert record == {"pass": 4, "loss": 1.25, "auc": 0.75, "samples": 4, "seconds": 1.5}


def test_batches_end_at_the_limit_and_start_the_mean_anew(capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[dict[str, float]] = []
    args = argparse.Namespace(epochs=2, max_batches=3, history=None)
    made = report.Report(args, active=False, log=lambda values, **facts: logged.append({**values, **facts}))
    made.add_batch(torch.tensor(9.0), 5)
    assert len(list(made.batches(loader(20)))) == 3
    assert made.samples == 0
    made.add_batch(torch.tensor(3.0), 5)
    made.end_test(0, 0.5, 1.0)
    assert logged[1:] == [{"loss": 3.0, "total_steps": 6}, {"auc": 0.5}]
    made.line("hidden")
    assert capsys.readouterr().out == ""


def test_a_loader_without_a_batch_is_refused() -> None:
    made = report.Report(argparse.Namespace(epochs=2, max_batches=None, history=None))
    with pytest.raises(ValueError, match="--batch-size is more"):
        list(made.batches(loader(1)))
