"""``python -m fleet.ps scale``: which shards move, and moves while processes are killed."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.env import Environment
from fleet.errors import ConfigError, PSError
from fleet.ps.__main__ import main
from fleet.ps_job.scale_command import Move, plan_moves, scale
from fleet.ps_job.server_line import tell_server
from tests.fleet.ps.service import SECRET
from tests.helpers.ps_fault_job import LIMIT_S, FaultJob, Kill, Training, expected_tables
from tests.helpers.served import _free_endpoints

SHARDS, PROCESSES, WORKERS, STEPS = 4, 3, 2, 120


@pytest.mark.parametrize("seed", range(30))
def test_moves_are_few_and_even(seed: int) -> None:
    """Whatever the start: as many processes serve as asked, evenly, and no other plan moves fewer shards."""
    rng = random.Random(seed)
    processes, shards = rng.randint(1, 5), rng.randint(1, 9)
    owners = [rng.randrange(processes) for _ in range(shards)]
    number = rng.randint(1, min(processes, shards))
    moves = plan_moves(owners, number, processes)
    after = list(owners)
    for move in moves:
        assert after[move.shard] == move.source != move.target
        after[move.shard] = move.target
    counts = sorted((after.count(process) for process in set(after)), reverse=True)
    assert len(counts) == number
    assert counts[0] - counts[-1] <= 1
    held = sorted((owners.count(process) for process in range(processes)), reverse=True)[:number]
    assert len(moves) == shards - sum(min(have, room) for have, room in zip(held, counts, strict=True))


def test_a_process_that_is_away_gets_nothing() -> None:
    assert plan_moves([0, 0, 0, 0], 2, 3, {1}) == [Move(2, 0, 2), Move(3, 0, 2)]
    with pytest.raises(ConfigError, match=r"3 server processes, \[1\] of which do not answer, and 4 shards, so 1 to 2"):
        plan_moves([0, 0, 0, 0], 3, 3, {1})


@pytest.mark.parametrize("number", [0, -1, 3])
def test_numbers_that_cannot_be(number: int) -> None:
    with pytest.raises(ConfigError, match=f"scale to {number}: .* 1 to 2 can serve"):
        plan_moves([0, 1], number, 4)


def test_a_job_whose_shards_cannot_move(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from fleet.ps.server.server import Server
    from fleet.ps.server.server_config import ServerConfig

    server = Server(ServerConfig(secret=SECRET), notify=lambda line: None)
    server.start()
    monkeypatch.setenv("FLEET_JOB_SECRET", SECRET.decode())
    try:
        assert main(["scale", server.endpoint, "2"]) == 2
        assert "Start the job with --server_standby or --server_shards" in capsys.readouterr().err
    finally:
        server.stop()


@pytest.mark.parametrize("arguments", [[], ["a"], ["a", "b"], ["--help"]])
def test_calls(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", *arguments]) == (0 if arguments == ["--help"] else 2)
    assert "usage: python -m fleet.ps scale" in "".join(capsys.readouterr())


class MovingShards(FaultJob):
    """Shards move while workers and servers are killed; ``"scale N"`` among the kills begins to move them."""

    def __init__(self, folder: Path, mode: str) -> None:
        super().__init__(
            folder, mode, num_servers=PROCESSES, num_workers=WORKERS, steps=STEPS, training=Training(after_step=_pause)
        )
        places = [_free_endpoints(SHARDS) for _ in range(PROCESSES)]
        shared = {
            "FLEET_PS_SHARD_ENDPOINTS": ";".join(map(",".join, places)),
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(places[shard % 2][shard] for shard in range(SHARDS)),
        }
        for name, variables in self.variables.items():
            variables.update(shared)
            if name.startswith("server"):
                variables["PADDLE_PORT"] = places[int(name[-1])][0].rpartition(":")[2]
        self.places = places
        self.said: list[str] = []
        self.orders: list[threading.Thread] = []

    def kill(self, name: str) -> None:
        """Kills a process, or moves shards in the background, again where a kill came between."""
        if not name.startswith("scale"):
            super().kill(name)
            return
        for order in self.orders:
            order.join()  # orders follow each other
        self.orders.append(threading.Thread(target=self._scale, args=(int(name.split()[1]),), daemon=True))
        self.orders[-1].start()

    def start(self, name: str) -> None:
        if not name.startswith("scale"):
            super().start(name)

    def _scale(self, number: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            try:
                scale(self.places[0][0], number, _tell, self.said.append)
                return
            except (PSError, ConfigError) as error:  # a process is being started again
                self.said.append(f"{error}")
                time.sleep(0.2)


def _tell(server: str, fields: dict[str, Any]) -> dict[str, Any]:
    return tell_server(server, fields, Environment({}))


def _pause(rank: int, step: int) -> None:
    time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_shards_move_while_training_goes_on(tmp_path: Path, mode: str) -> None:
    """Two processes become three, one, and three again; the tables are those of an undisturbed run."""
    job = MovingShards(tmp_path / "job", mode)
    orders = [Kill(20 + 40 * turn, f"scale {number}") for turn, number in enumerate([3, 1, 3, 2])]
    found = job.run(orders)
    assert [line for line in job.said if line.startswith("shard")], job.said
    assert any(line.startswith("3 of 3") for line in job.said), job.said
    assert any(line.startswith("1 of 3") for line in job.said), job.said
    for name, table in expected_tables(WORKERS, STEPS, mean=mode == "sync").items():
        assert torch.equal(found[name], table), name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_kills_while_shards_move(tmp_path: Path, mode: str, seed: int) -> None:
    """Any process may be killed at any point of a move; no change is lost or applied twice."""
    job = MovingShards(tmp_path / "job", mode)
    rng = random.Random(seed)
    kills: list[Kill] = []
    for turn, number in enumerate(rng.choices([1, 2, 3], k=5)):
        steps = 12 + 34 * turn
        kills += [Kill(steps, f"scale {number}"), Kill(steps + rng.randrange(3), rng.choice(job.names))]
    found = job.run(sorted(kills, key=lambda kill: kill.steps), limit_s=2 * LIMIT_S)
    for name, table in expected_tables(WORKERS, STEPS, mean=mode == "sync").items():
        assert torch.equal(found[name], table), (name, job.said)
