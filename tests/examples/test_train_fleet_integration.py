"""The Fleet scripts of the example in one process and, through the launcher, in two."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from tests.examples.scripts import (
    TINY,
    command,
    descendants,
    history,
    launched,
    run,
    running,
    train,
    wait_for,
)

DYGRAPH, CHECKPOINT, STATIC = "train_fleet_dygraph.py", "train_fleet_dygraph_ckpt.py", "train_fleet_static.py"


@pytest.mark.slow
def test_the_fleet_script_runs_in_one_process(tmp_path: Path) -> None:
    """002-01: the changed script still runs by itself."""
    output = train(command(DYGRAPH, *TINY, "--epochs", "2", "--max-batches", "8", "--history", "h"), tmp_path)
    assert re.search(r"^\[Epoch 1, batch 7\] loss: \d+\.\d{5}, acc1: \d\.\d{5}, acc5: \d\.\d{5}$", output, re.MULTILINE)
    records = history(tmp_path / "h")
    assert records[1]["loss"] < records[0]["loss"]
    assert records[0]["images"] == 8 * 32


def test_a_wrong_strategy_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "strategy.yaml").write_text("sync_batchnorm: true\n")
    code, output = run(command(DYGRAPH, *TINY, "--strategy", "strategy.yaml"), tmp_path)
    assert code == 1
    assert "Did you mean 'sync_batch_norm'?" in output


@pytest.mark.slow
def test_two_processes_reach_97_percent(tmp_path: Path) -> None:
    """002-01, 002-08: the demonstration, in less than three minutes on two CPU cores."""
    train(launched(DYGRAPH, "--history", "h.jsonl"), tmp_path, limit_s=180)
    records = history(tmp_path / "h.jsonl")
    assert len(records) == 10
    assert records[-1]["test_acc1"] >= 0.97
    assert records[-1]["loss"] < 0.1 * records[0]["loss"]
    log = (tmp_path / "log" / "workerlog.0").read_text()
    # Every process gives 22 batches of 32 images.
    assert {record["images"] for record in records} == {2 * 22 * 32}
    assert len(re.findall(r"^\[Epoch \d+, batch \d+\] loss: \d+\.\d{5}, acc1: ", log, re.MULTILINE)) == 10 * 5
    assert f"Test accuracy: {records[-1]['test_acc1']:.5f} on 359 images" in log
    # The guard of rank 0: the other process prints no results.
    assert "Epoch" not in (tmp_path / "log" / "workerlog.1").read_text()


@pytest.mark.slow
def test_two_processes_with_half_batches_equal_one_with_whole_batches(tmp_path: Path) -> None:
    """002-05 and 002-06: gradients are averaged, and each process has its own half of every batch.

    Batch statistics have to span both processes for that; 7 pixels leave no room for random shifts, and with a small
    learning rate rounding does not grow.
    """
    (tmp_path / "strategy.yaml").write_text("sync_batch_norm: true\n")
    options = ("--width", "4", "--image-size", "7", "--lr", "0.01", "--epochs", "2", "--max-batches", "4")
    two = ("--strategy", "strategy.yaml", "--batch-size", "16", "--history", "two")
    train(launched(DYGRAPH, *options, *two), tmp_path)
    train(command(DYGRAPH, *options, "--batch-size", "32", "--history", "one"), tmp_path)
    one, both = history(tmp_path / "one"), history(tmp_path / "two")
    for first, second in zip(one, both, strict=True):
        assert second["images"] == first["images"] == 128
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert second["acc1"] == first["acc1"]
    assert one[1]["loss"] < one[0]["loss"]


@pytest.mark.slow
def test_a_killed_run_resumes_at_the_next_epoch_with_the_numbers_of_an_unbroken_one(tmp_path: Path) -> None:
    """003-37, 004-07, 004-08, 004-15: one process writes, rank 0 alone reads, every process continues from it."""
    options = (*TINY, "--epochs", "4", "--checkpoint", "c/net.pdparams", "--history", "h.jsonl")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    train(launched(CHECKPOINT, *options), whole)

    with running(launched(CHECKPOINT, *options), broken) as launcher:
        wait_for("[Epoch 2, batch 3]", broken / "log" / "workerlog.0")
        (worker,) = [
            pid
            for pid, variables in descendants(launcher.pid).items()
            if variables.get("PADDLE_TRAINER_ID") == "1" and CHECKPOINT in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        os.kill(worker, signal.SIGKILL)
        assert launcher.wait(60) == 128 + signal.SIGKILL
    assert torch.load(broken / "c" / "net.pdparams", weights_only=True)["epoch"] == 1

    shutil.rmtree(broken / "log")
    output = train(launched(CHECKPOINT, *options), broken)
    assert "Resuming after epoch 1 of c/net.pdparams" in output
    assert "[Epoch 2, batch 0]" in output
    assert "[Epoch 1, batch 0]" not in output
    assert [record["epoch"] for record in history(broken / "h.jsonl")] == [0, 1, 2, 3]

    expected, found = (torch.load(f / "c" / "net.pdparams", weights_only=True) for f in (whole, broken))
    assert found.pop("epoch") == expected.pop("epoch") == 3
    momentum = [state.pop("optimizer")["state"] for state in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(momentum[0], momentum[1], rtol=0, atol=0)
    # Nothing is left to do for a run that has ended.
    assert "Test accuracy" not in train(launched(CHECKPOINT, *options), broken)


@pytest.mark.slow
def test_the_checkpoint_script_resumes_in_one_process(tmp_path: Path) -> None:
    """004-07: ``int(fleet.local_rank())`` works without a launcher, too."""
    options = (*TINY, "--max-batches", "4", "--checkpoint", "net.pdparams")
    train(command(CHECKPOINT, *options, "--epochs", "1"), tmp_path)
    output = train(command(CHECKPOINT, *options, "--epochs", "2"), tmp_path)
    assert "Resuming after epoch 0 of net.pdparams" in output
    assert "[Epoch 1, batch 3]" in output
    assert "[Epoch 0" not in output


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_the_static_script_compiles_and_learns(tmp_path: Path) -> None:
    """002-09: compiling takes most of a minute on a CPU, so two batches have to do."""
    line = command(STATIC, *TINY, "--epochs", "2", "--max-batches", "2", "--history", "h")
    output = train(line, tmp_path, limit_s=300)
    assert "to_static" in output
    records = history(tmp_path / "h")
    assert len(records) == 2
    assert records[1]["loss"] < records[0]["loss"]
