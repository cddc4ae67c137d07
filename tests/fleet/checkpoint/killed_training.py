"""Training that saves after every step until it is killed; every number of its state is the number of the step."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.checkpoint.writer import own_writer
from tests.helpers.workers import free_ports, worker_environment

WIDTH = 512
_STARTED_S = 60.0


def train(rank: int, world_size: int, environment: dict[str, str], folder: str, asynchronous: bool) -> None:
    """Loads the checkpoint if there is one, and trains and saves; says in ``said.RANK`` what it does."""
    os.environ.update(environment)
    base = Path(folder)
    errors = os.open(base / f"errors.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    said = os.open(base / f"said.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def say(text: str) -> None:
        os.write(said, f"{text}\n".encode())

    torch.set_num_threads(1)
    fleet.init(is_collective=True, log_level="CRITICAL")
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    user = torch.optim.AdamW(model.parameters())
    objects: dict[str, Any] = {"model": model, "optimizer": user}
    if world_size > 1:
        objects = {"model": fleet.distributed_model(model), "optimizer": fleet.distributed_optimizer(user)}
    objects["model"](torch.zeros(1, WIDTH)).sum().backward()
    objects["optimizer"].step()  # makes its state
    path, step = base / "checkpoint", 0
    if (path / "index.json").exists():
        step = fleet.checkpoint.load(path, {**objects, "step": 0})["step"]
        assert {float(value.unique()) for value in numbers(model, user)} == {float(step)}
    say(f"resumed {step}")
    while True:
        step += 1
        with torch.no_grad():
            for value in numbers(model, user):
                value.fill_(step)
        say(f"began {step}")
        fleet.checkpoint.save(path, {**objects, "step": step}, asynchronous=asynchronous)
        if asynchronous:
            say(f"writer {own_writer()._process.pid}")  # type: ignore[union-attr]
            fleet.checkpoint.wait()
        say(f"done {step}")


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields the parameters and their states."""
    for parameter in model.parameters():
        yield parameter
        yield optimizer.state[parameter]["exp_avg"]
        yield optimizer.state[parameter]["exp_avg_sq"]


def check_whole(path: Path) -> int:
    """Returns the step of the checkpoint; every byte of it is right, and every number is that of the step."""
    found = fleet.checkpoint.load(path)
    step = int(found["step"])
    values = [*found["model"].values()]
    values += [value for name, value in found["optimizer"].items() if name.endswith(("exp_avg", "exp_avg_sq"))]
    assert len(values) == 18
    assert {float(number) for value in values for number in value.unique()} == {float(step)}
    return step


def kill_once(folder: Path, world_size: int, asynchronous: bool, source: random.Random) -> tuple[int, int]:
    """Trains until something is killed, and everything else after it; returns the last step said to be saved, or 0,
    and the last that was begun."""
    for old in folder.glob("said.*"):
        old.unlink()
    with _training(folder, world_size, asynchronous) as pids:
        _await(folder, world_size, pids, source.choice(["began", "done", "done"]))
        time.sleep(source.uniform(0.0, 0.25))
        victims = [*range(world_size)] + (["writer"] * world_size if asynchronous else [])
        victim = source.choice(victims)
        if victim == "writer":
            _kill(_said(folder, source.randrange(world_size)).get("writer", -1))
            time.sleep(source.uniform(0.0, 0.05))
        else:
            os.kill(pids[int(victim)], signal.SIGKILL)
            time.sleep(source.uniform(0.0, 0.05))  # as long as a launcher takes
    heard = [_said(folder, rank) for rank in range(world_size)]
    return max(one.get("done", 0) for one in heard[:1]), max(one.get("began", 0) for one in heard)


@contextmanager
def _training(folder: Path, world_size: int, asynchronous: bool) -> Iterator[list[int]]:
    """Forks the workers of a training, in a fraction of a second; this process has imported everything."""
    ports = free_ports(world_size + 1)
    pids: list[int] = []
    try:
        for rank in range(world_size):
            if (pid := os.fork()) == 0:
                try:
                    train(rank, world_size, worker_environment(rank, world_size, ports), f"{folder}", asynchronous)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(1)
            pids.append(pid)
        yield pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _await(folder: Path, world_size: int, pids: list[int], what: str) -> None:
    deadline = time.monotonic() + _STARTED_S
    while not all(what in _said(folder, rank) for rank in range(world_size)):
        ended = [pid for pid in pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        if time.monotonic() > deadline or ended:
            texts = [path.read_text()[-3000:] for path in folder.glob("errors.*")]
            raise AssertionError("\n".join(["the training did not start", *texts]))
        time.sleep(0.005)


def _said(folder: Path, rank: int) -> dict[str, int]:
    """Returns the last number of each kind that a worker has said."""
    try:
        lines = (folder / f"said.{rank}").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return {}
    return {line.split()[0]: int(line.split()[1]) for line in lines}


def _kill(pid: int) -> None:
    if pid > 0:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            print(f"{pid} has ended already", file=sys.stderr)


def kill_again_and_again(
    rank: int, _: int, where: str, world_size: int, asynchronous: bool, kills: int, seed: int
) -> list[int]:
    """Kills trainings one after the other, each going on from what the one before has left; returns the steps."""
    folder, source = Path(where), random.Random(seed)
    path, steps = folder / "checkpoint", [0]
    for _ in range(kills):
        done, began = kill_once(folder, world_size, asynchronous, source)
        least = max(steps[-1], done)
        if least or (path / "index.json").exists():
            found = check_whole(path)
            assert least <= found <= began, f"{least} <= {found} <= {began}"
            steps.append(found)
    time.sleep(1.0)  # what was being written has ended by now
    assert check_whole(path) >= steps[-1] > 0
    return steps
