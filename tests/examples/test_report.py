"""What a training script prints and writes."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.examples.scripts import example_module

report_module = example_module("report")

LOADER = DataLoader(TensorDataset(torch.arange(12.0)), batch_size=2)
# Rows 0 and 1 are right at once, row 2 among five, row 3 not.
LOGITS = torch.tensor([[9.0, 1, 1, 1, 1, 1], [0, 9, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0]])
LABELS = torch.tensor([0, 1, 4, 5])


def make(**changes: Any) -> Any:
    """Returns a Report whose options have ``changes``; ``active`` and ``resume`` go to the Report itself."""
    flags = {name: changes.pop(name) for name in ("active", "resume") if name in changes}
    args = {"log_every": 1, "max_batches": None, "epochs": 3, "history": None, "batch_size": 2, **changes}
    return report_module.Report(argparse.Namespace(**args), **flags)


def test_a_batch_line_is_that_of_the_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    """002-08."""
    report = make()
    list(report.batches(LOADER, 3))
    report.add_batch(5, torch.tensor(1.25), LOGITS, LABELS)
    assert capsys.readouterr().out == "[Epoch 3, batch 5] loss: 1.25000, acc1: 0.50000, acc5: 0.75000\n"


def test_every_so_many_batches_have_a_line_and_all_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    report = make(log_every=5)
    for index, _ in report.batches(LOADER, 0):
        report.add_batch(index, torch.tensor(float(index)), LOGITS, LABELS)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("]")[0] for line in lines] == ["[Epoch 0, batch 0", "[Epoch 0, batch 5"]
    assert report.sums.tolist() == [4 * 15, 6 * 2, 6 * 3, 6 * 4]


def test_an_epoch_starts_with_empty_sums_and_ends_after_max_batches() -> None:
    report = make(max_batches=4, active=False)
    report.sums += 1
    assert [index for index, _ in report.batches(LOADER, 0)] == [0, 1, 2, 3]
    assert report.sums.tolist() == [0, 0, 0, 0]
    assert report.num_batches(LOADER) == 4
    assert make(max_batches=400).num_batches(LOADER) == 6


def test_a_loader_without_a_batch_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(3.0)), batch_size=8, drop_last=True)
    with pytest.raises(ValueError, match="--batch-size is 2, more than the training images of one process"):
        make().num_batches(loader)


def test_the_history_has_one_record_per_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "history.jsonl"
    report = make(history=str(path))
    for epoch in range(2):
        list(report.batches(LOADER, epoch))
        report.end_epoch(np.array([6.0, 2, 3, 4]), 0.5 + epoch / 4, 0.1)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["epoch"] for record in records] == [0, 1]
    assert records[1].pop("seconds") >= 0
    assert records[1] == {
        "epoch": 1, "loss": 1.5, "acc1": 0.5, "acc5": 0.75, "test_acc1": 0.75, "images": 4, "lr": 0.1,
    }  # fmt: skip
    assert "[Epoch 1] mean loss: 1.50000, acc1: 0.50000, acc5: 0.75000, test acc1: 0.75000" in capsys.readouterr().out


def test_the_history_of_updates_has_every_bit_of_their_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "history.jsonl"
    report = make(history=str(path), log_every=2)
    for update, loss in ((1, 2.5), (2, 0.1 + 0.2)):
        report.add_update(update, 4, loss, 3)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert records == [{"update": 1, "loss": 2.5, "workers": 3}, {"update": 2, "loss": 0.1 + 0.2, "workers": 3}]
    assert capsys.readouterr().out == "[Update 2/4] loss: 0.300000000, 3 worker(s)\n"


def test_a_new_run_starts_the_history_anew_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("old\n")
    make(history=str(path), resume=True)
    assert path.read_text() == "old\n"
    make(history=str(path), active=False)
    assert path.read_text() == "old\n"
    make(history=str(path))
    assert path.read_text() == ""


def test_an_inactive_report_is_silent_and_still_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks other than 0 add to the sums over all ranks."""
    report = make(active=False, history=str(tmp_path / "history"))
    for index, _ in report.batches(LOADER, 0):
        report.add_batch(index, torch.tensor(1.0), LOGITS, LABELS)
    report.end_epoch(report.sums, 1.0, 0.1)
    assert report.sums[3] == 24
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("terminal", "active", "bar"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_progress_bar_appears_on_a_terminal_only(
    terminal: bool, active: bool, bar: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    report = make(active=active)
    assert len(list(report.batches(LOADER, 1))) == 6
    report.line("done")
    out = capsys.readouterr().out
    assert ("Epoch 2/3" in out) == bar
    assert ("| 0/6 [" in out) == bar
    assert ("done" in out) == active
