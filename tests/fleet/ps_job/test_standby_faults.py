"""Servers that are killed and lose their folders while their standbys follow: the tables come out bit-equal."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.ps_fault_job import LIMIT_S, FaultJob, Kill, Training, expected_tables, plan_kills

SERVERS, WORKERS, STEPS = 2, 2, 40
TURNS, TURN = 8, 25  # steps of a turn
PLAIN = Training()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_lost_servers(tmp_path: Path, mode: str, seed: int) -> None:
    """Each of ten jobs loses both servers, disk and all, at random points."""
    job = FaultJob(
        tmp_path / "job",
        mode,
        num_servers=SERVERS,
        num_workers=WORKERS,
        steps=STEPS,
        standby=True,
        training=Training(after_step=_say_when),
    )
    points = plan_kills(seed, 2, ["server-0"], STEPS * WORKERS)
    kills = [type(kill)(kill.steps, f"server-{index}") for index, kill in enumerate(points)]
    found = job.run(kills)
    expected = expected_tables(WORKERS, STEPS, mean=mode == "sync")
    for name, table in expected.items():
        assert torch.equal(found[name], table), name


def _say_when(rank: int, step: int) -> None:
    print(f"step {step} at {time.monotonic()}", flush=True)


class TakingTurns(FaultJob):
    """Servers and their standbys: whichever is killed loses its folder, comes back, and is the standby then.

    The workers wait for each turn, and go on as soon as there is a whole pair, so that it is lost while they train.
    """

    def __init__(
        self, folder: Path, mode: str, *, turns: int, num_servers: int = 1, training: Training = PLAIN
    ) -> None:
        wait = partial(_wait_for_turn, str(folder / "turns"), turns)
        steps = TURN * (turns + 1)
        super().__init__(
            folder,
            mode,
            num_servers=num_servers,
            num_workers=WORKERS,
            steps=steps,
            standby=True,
            training=replace(training, after_step=wait),
        )
        self.standby = False  # what is killed is started again
        self.led: list[str] = []
        self.rng = random.Random(turns)

    def epochs(self, index: int) -> dict[str, tuple[int, bool]]:
        """Returns the epoch of each of the two, and whether it leads; without those that have none."""
        found = {}
        for name in (f"server-{index}", f"standby-{index}"):
            with suppress(OSError, ValueError):
                fields = json.loads((self.folder / "state" / name / "epoch.json").read_text())
                found[name] = (fields["epoch"], fields["leads"])
        return found

    def is_whole(self, index: int) -> bool:
        """Whether one leads and the other has joined it."""
        epochs = self.epochs(index)
        return len(epochs) == 2 and len({epoch for epoch, _ in epochs.values()}) == 1

    def kill(self, name: str) -> None:
        """Kills the one that leads, or its standby, once there is one; or lets the one that leads hand over."""
        kind, _, number = name.partition("-")
        index = int(number or 0)
        deadline = time.monotonic() + LIMIT_S
        while not self.is_whole(index):
            assert time.monotonic() < deadline, f"{self.epochs(index)}: {self.logs()}"
            time.sleep(0.02)
        place = next(one for one, (_, leads) in self.epochs(index).items() if leads is (kind != "follower"))
        with (self.folder / "turns").open("a") as turns:
            turns.write(".")
        if kind == "switch":
            self.led.append("")
            variables = self.variables[place]
            endpoint = f"{variables['POD_IP']}:{variables['PADDLE_PORT']}"
            own = {name: value for name, value in os.environ.items() if not name.startswith(("FLEET_", "PADDLE_"))}
            command = [sys.executable, "-m", "fleet.ps", "switch", endpoint]
            done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
            assert f"{endpoint} is its standby" in done.stdout, done.stderr
            return
        self.led.append(place if kind == "leader" else "")
        time.sleep(self.rng.uniform(0, 0.3))
        super().kill(place)
        shutil.rmtree(self.folder / "state" / place)
        super().start(place)

    def start(self, name: str) -> None:
        if name in self.names:
            super().start(name)  # what was killed is already running again


def turns_of(names: Sequence[str]) -> list[Kill]:
    """Returns one turn for each name, when all workers wait for it."""
    return [Kill(WORKERS * TURN * number, name) for number, name in enumerate(names, start=1)]


def _wait_for_turn(path: str, turns: int, rank: int, step: int) -> None:
    number = step // TURN
    while step % TURN == 0 and 1 <= number <= turns and not _has_begun(path, number):
        time.sleep(0.005)


def _has_begun(path: str, number: int) -> bool:
    return os.path.exists(path) and os.path.getsize(path) >= number


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_server_and_standby_take_turns(tmp_path: Path, mode: str) -> None:
    """Eight times one is lost with its folder, or hands over; the tables are those of an undisturbed run."""
    job = TakingTurns(tmp_path / "job", mode, turns=TURNS)
    rng = random.Random(5)
    names = ["leader", "switch", *rng.choices(["leader", "switch", "follower"], k=TURNS - 2)]
    found = job.run(turns_of(names), limit_s=2 * LIMIT_S)
    assert "server-0" in job.led
    for name, table in expected_tables(WORKERS, job.steps, mean=mode == "sync").items():
        assert torch.equal(found[name], table), name
