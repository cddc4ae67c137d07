"""Servers that are killed and lose their folders while their standbys follow: the tables come out bit-equal."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.ps_fault_job import LIMIT_S, FaultJob, Kill, Training, expected_tables, plan_kills

SERVERS, WORKERS, STEPS = 2, 2, 40
TURNS, LONG = 8, 200


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
    """One server and its standby: whichever is killed loses its folder, comes back, and is the standby then."""

    def __init__(self, folder: Path, mode: str) -> None:
        training = Training(after_step=partial(_wait_near_the_end, str(folder / "turns-are-over")))
        super().__init__(folder, mode, num_servers=1, num_workers=WORKERS, steps=LONG, standby=True, training=training)
        self.standby = False  # what is killed is started again
        self.led: list[str] = []

    def epochs(self) -> dict[str, tuple[int, bool]]:
        """Returns the epoch of each of the two, and whether it leads; without those that have none."""
        found = {}
        for name in ("server-0", "standby-0"):
            with suppress(OSError, ValueError):
                fields = json.loads((self.folder / "state" / name / "epoch.json").read_text())
                found[name] = (fields["epoch"], fields["leads"])
        return found

    def is_whole(self) -> bool:
        """Whether one leads and the other has joined it."""
        epochs = self.epochs()
        return len(epochs) == 2 and len({epoch for epoch, _ in epochs.values()}) == 1

    def kill(self, name: str) -> None:
        """Kills the one that leads, or its standby, once there is one; or lets the one that leads hand over."""
        deadline = time.monotonic() + LIMIT_S
        while not self.is_whole():
            assert time.monotonic() < deadline, f"{self.epochs()}: {self.logs()}"
            time.sleep(0.02)
        place = next(one for one, (_, leads) in self.epochs().items() if leads is (name != "follower"))
        if name == "switch":
            self.led.append("")
            variables = self.variables[place]
            endpoint = f"{variables['POD_IP']}:{variables['PADDLE_PORT']}"
            own = {name: value for name, value in os.environ.items() if not name.startswith(("FLEET_", "PADDLE_"))}
            command = [sys.executable, "-m", "fleet.ps", "switch", endpoint]
            done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=60)
            assert f"{endpoint} is its standby" in done.stdout, done.stderr
            self.end_turn()
            return
        self.led.append(place if name == "leader" else "")
        super().kill(place)
        shutil.rmtree(self.folder / "state" / place)
        super().start(place)
        self.end_turn()

    def end_turn(self) -> None:
        """Lets the job end after the last turn."""
        if len(self.led) == TURNS:
            (self.folder / "turns-are-over").touch()

    def start(self, name: str) -> None:
        if name in self.names:
            super().start(name)  # what was killed is already running again


def _wait_near_the_end(over: str, rank: int, step: int) -> None:
    while step == LONG - 20 and not Path(over).exists():
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_server_and_standby_take_turns(tmp_path: Path, mode: str) -> None:
    """Eight times one is lost with its folder, or hands over; the tables are those of an undisturbed run."""
    job = TakingTurns(tmp_path / "job", mode)
    rng = random.Random(5)
    names = ["leader", "switch", *rng.choices(["leader", "switch", "follower"], k=TURNS - 2)]
    found = job.run([Kill(10 + 30 * turn, name) for turn, name in enumerate(names)], limit_s=2 * LIMIT_S)
    assert "server-0" in job.led
    for name, table in expected_tables(WORKERS, LONG, mean=mode == "sync").items():
        assert torch.equal(found[name], table), name
