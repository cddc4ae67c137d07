"""kill -9 at any moment of a save: the newest whole checkpoint is there, and nothing else is ever loaded."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.elastic.faults import POINTS
from tests.fleet.elastic.training import Training
from tests.helpers.workers import WorkerError, run_workers

KILLS = 100
STEPS = 4  # saves of each process


def big_training(folder: str) -> Any:
    """Returns model, optimizer and checkpoint of a few megabytes, so that a file has several blocks."""
    fleet.init(is_collective=True, log_level="ERROR")
    torch.manual_seed(0)
    net = torch.nn.Linear(600, 600)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
    model = fleet.distributed_model(net)
    return model, optimizer, fleet.elastic.Checkpoint(folder, model, optimizer, keep=2, asynchronous=True)


def one_step(model: Any, optimizer: Any, step: int) -> None:
    """Trains; the numbers depend on the step alone."""
    data = torch.randn(2, 600, generator=torch.Generator().manual_seed(step))
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def total(model: Any) -> float:
    """A number that any damage to the parameters changes."""
    return float(sum((p.double() * torch.arange(1, p.numel() + 1).view_as(p)).sum() for p in model.parameters()))


def resume_and_save(folder: str, news_fd: int) -> None:
    """Resumes, says where, and saves after each of ``STEPS`` steps; says so when a save is complete."""
    model, optimizer, checkpoint = big_training(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no damaged one is ever found
        checkpoint.resume()
    os.write(news_fd, f"resumed {checkpoint.step} {total(model)!r}\n".encode())
    for _ in range(STEPS):
        one_step(model, optimizer, checkpoint.step)
        checkpoint.save()
        checkpoint._background.finish()
        os.write(news_fd, f"saved {checkpoint.step}\n".encode())


def kill_again_and_again(rank: int, world_size: int, folder: str) -> Any:
    """Starts ``KILLS`` processes one after the other, each killed by itself at a point of some save."""
    torch.set_num_threads(1)
    model, optimizer, checkpoint = big_training(folder)  # imports everything before the first fork
    reference = [total(model)]
    for step in range(KILLS * STEPS):
        if len(reference) <= 40:
            one_step(model, optimizer, step)
            reference.append(total(model))
    source = random.Random(11)
    newest, killed, points = 0, 0, set()
    for turn in range(KILLS):
        point = source.choice([p for p in POINTS if p.startswith("save")])
        step = newest + source.randint(1, 2)
        count = source.randint(1, 6) if point == "save.block" else 1
        status, news = run_child(folder, f"{point}:kill:step={step}:count={count}")
        where, step_text, sum_text = news[0].split()
        assert where == "resumed"
        # Complete before the kill: it must be there. Nothing older, and nothing but what training gave at that step.
        assert int(step_text) >= newest, (turn, point, newest, news)
        assert float(sum_text) == reference[int(step_text)]
        newest = max([int(step_text), *(int(line.split()[1]) for line in news[1:])])
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            killed += 1
            points.add(point)
        if newest > 30:  # begin anew, so that the reference stays short
            for path in Path(folder).iterdir():
                os.rename(path, f"{folder}.old.{turn}.{path.name}")
            newest = 0
    return {"killed": killed, "points": sorted(points)}


def run_child(folder: str, faults: str) -> tuple[int, list[str]]:
    """Forks a process with these faults; returns how it ended and what it said."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        os.environ["FLEET_FAULTS"] = faults
        code = 1
        with contextlib.suppress(BaseException):
            resume_and_save(folder, write_fd)
            code = 0
        os._exit(code)
    os.close(write_fd)
    with os.fdopen(read_fd) as news:
        lines = news.read().splitlines()
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, lines
    return status, lines


@pytest.mark.slow
def test_of_100_kills_none_loses_a_checkpoint(tmp_path: Path) -> None:
    """The figure to beat: torch.save onto one path lost 6 of 6, paddle.save 2 of 6."""
    (result,) = run_workers(kill_again_and_again, 1, str(tmp_path / "run"), timeout_s=150, backend=None)
    print(result)
    assert result["killed"] > 0.8 * KILLS
    # save.prune is passed only where something is removed; it is among them with this seed.
    assert result["points"] == sorted(p for p in POINTS if p.startswith("save"))


def save_every_2(rank: int, world_size: int, folder: str, option: str) -> Any:
    """Two workers, with states of their own or not; one may be killed in its save."""
    options: dict[str, Any] = {option: True, "localsgd_configs": {"k_steps": 3}} if option else {}
    training = Training(folder, options, every=2, asynchronous=option == "")
    training.checkpoint.resume()
    start = training.checkpoint.step
    training.run(1)
    return {"start": start, "weight": training.numbers()[0]}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["", "localsgd"])
@pytest.mark.parametrize("fault", ["save.block:kill:rank=1", "save.part:kill:rank=1", "save.rename:kill:rank=0"])
def test_a_worker_killed_in_its_own_part_leaves_the_checkpoint_before(fault: str, option: str, tmp_path: Path) -> None:
    whole = run_workers(save_every_2, 2, str(tmp_path / "whole"), option, backend=None)
    with pytest.raises(WorkerError):
        run_workers(
            save_every_2, 2, str(tmp_path / "cut"), option, backend=None,
            environment={"FLEET_FAULTS": f"{fault}:step=4"},
        )  # fmt: skip
    found = run_workers(save_every_2, 2, str(tmp_path / "cut"), option, backend=None)
    assert [result["start"] for result in found] == [2, 2]
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one["weight"], other["weight"])
