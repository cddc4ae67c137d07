"""kill -9 while checkpoints are written: how many tries lose a checkpoint that was said to be complete.

Beside fleet.elastic.Checkpoint stands what torch's tutorial for torchrun does: ``torch.save`` over one file. A process
that has imported everything forks the trainings, so that a try takes a fraction of a second. Arguments: fleet or plain,
tries, a folder. Prints how many tries were lost.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fleet
from fleet.elastic import Checkpoint  # noqa: E402

WIDTH = 1024  # 4 MiB of parameters, 8 more of Adam
LONGEST_S = 0.3


def say(pipe: int, step: int) -> None:
    os.write(pipe, step.to_bytes(8, "little", signed=True))


def train_with_fleet(folder: Path, pipe: int) -> None:
    """Trains, saving after every step; says the step it goes on from, and each that is saved."""
    fleet.init(is_collective=True, log_level="CRITICAL")
    net = fleet.distributed_model(torch.nn.Linear(WIDTH, WIDTH))
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters()))
    checkpoint = Checkpoint(folder / "checkpoints", net, optimizer, keep=2)
    checkpoint.resume()
    say(pipe, checkpoint.step)
    while True:
        net(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save()
        say(pipe, checkpoint.step)


def train_plainly(folder: Path, pipe: int) -> None:
    """The same with torch.save over one file."""
    net, step, path = torch.nn.Linear(WIDTH, WIDTH), 0, folder / "snapshot.pt"
    optimizer = torch.optim.Adam(net.parameters())
    if path.exists():
        try:
            snapshot = torch.load(path, weights_only=True)
            net.load_state_dict(snapshot["model"])
            optimizer.load_state_dict(snapshot["optimizer"])
            step = snapshot["step"]
        except Exception:  # whatever a cut file raises: it is lost
            path.unlink()
    say(pipe, step)
    while True:
        net(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
        say(pipe, step)


def one_try(train: Callable[[Path, int], None], folder: Path, wait_s: float) -> tuple[int, int]:
    """Runs a training until ``wait_s`` after its first save; returns the step it went on from and the last saved."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        try:
            train(folder, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        steps = [int.from_bytes(pipe.read(8), "little", signed=True) for _ in range(2)]
        time.sleep(wait_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while data := pipe.read(8):
            steps.append(int.from_bytes(data, "little", signed=True))
    return steps[0], steps[-1]


def main() -> None:
    """Counts what is lost."""
    train = {"fleet": train_with_fleet, "plain": train_plainly}[sys.argv[1]]
    tries, folder, saved, lost = int(sys.argv[2]), Path(sys.argv[3]), 0, 0
    for _ in range(tries):
        resumed, newest = one_try(train, folder, random.uniform(0.0, LONGEST_S))
        lost += resumed < saved
        saved = newest
    resumed, _ = one_try(train, folder, 0.0)
    print(lost + (resumed < saved))


if __name__ == "__main__":
    main()
