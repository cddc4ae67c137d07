"""Hybrid jobs of real processes: gloo between trainers, rows on servers (issue: modes; D.7, D.9)."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fleet.errors import ConfigError
from fleet.facade import Fleet
from fleet.ps_job.hybrid_job import meet_trainers
from tests.fleet.ps.worker.test_hybrid_trainer import check_equal, hybrid
from tests.fleet.ps_job.test_server_job import Reference, make_adagrad
from tests.fleet.ps_job.test_server_job_integration import ROOT, finish, start
from tests.helpers.served import WideAndDeep, batches, train

SCRIPT = str(ROOT / "tests" / "helpers" / "hybrid_training.py")
STEPS = 8


def test_without_a_meeting_point() -> None:
    """002-27: the error says which variable is missing."""
    session: Any = SimpleNamespace(world_size=2, meet_workers=None)
    with pytest.raises(ConfigError, match="PADDLE_MASTER"):
        meet_trainers(session)
    assert meet_trainers(SimpleNamespace(world_size=1)).size == 1  # type: ignore[arg-type]


def launched(folder: Path, name: str, *flags: str, num_servers: int = 1, arguments: tuple[str, ...] = ()) -> Any:
    """Returns what the trainers wrote, and the launcher's output."""
    sizes = (f"--server_num={num_servers}", "--worker_num=2", f"--log_dir={folder / 'log' / name}")
    out = folder / name / "out"
    out.parent.mkdir()
    code, text = finish(start(["-m", "fleet.launch", *sizes, *flags, SCRIPT, str(out), *arguments]))
    logs = [(folder / "log" / name / f"workerlog.{rank}").read_text() for rank in range(2)]
    assert code == 0, text + "".join(logs)
    return [torch.load(f"{out}.{rank}.pt", weights_only=True) for rank in range(2)], text, logs


def trained_alone() -> Reference:
    reference = Reference()
    train(reference, make_adagrad(reference.parameters()), batches(STEPS))
    return reference


@pytest.mark.slow
@pytest.mark.parametrize("num_servers", [1, 2])
def test_two_trainers_on_gloo_equal_one_process(tmp_path: Path, num_servers: int) -> None:
    """D.7, D.9, 002-18, 001-10: twice with the same bits, the same on both trainers, 1e-6 of the mean gradient."""
    first, _, logs = launched(tmp_path, "first", num_servers=num_servers)
    again, _, _ = launched(tmp_path, "again", num_servers=num_servers)
    for found in (*first, *again):
        assert all(torch.equal(found[name], first[0][name]) for name in found)
    check_equal(first[0], trained_alone())
    assert "Communicator start (sync, dense gradients among the workers" in logs[0]


@pytest.mark.slow
def test_a_killed_trainer_brings_all_trainers_back(tmp_path: Path) -> None:
    """003-37, D.7: trainers start again from checkpoints of one step, servers stay; no step is lost or done twice."""
    found, text, logs = launched(tmp_path, "killed", "--max_restart=12", num_servers=2, arguments=("--kill",))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    check_equal(found[0], trained_alone())
    for rank in range(2):
        assert f"worker {rank} ended with code" in text
        assert re.search(rf"trainer {rank} goes on after step [45]", logs[rank])
    assert "server 0 ended" not in text
    assert "restart all of them" in logs[0]


@pytest.mark.gpu
def test_a_trainer_on_a_gpu() -> None:
    """003-21: parameters, pulled rows and the optimizer's state are on the GPU; the servers are on the host."""
    own, net = Fleet(), WideAndDeep()
    made = hybrid("sync", 1)
    own.init(strategy=made, log_level="WARNING")
    optimizer = own.distributed_optimizer(torch.optim.Adam(net.parameters(), 0.01), made)
    model = own.distributed_model(net)
    own.init_worker()
    data = [tuple(part.cuda() for part in batch) for batch in batches(4)]
    losses = train(model, optimizer, data * 5)
    assert net.out.weight.is_cuda
    assert optimizer.user_optimizer.state[net.out.weight]["exp_avg"].is_cuda
    own.stop_worker()
    assert losses[-1] < losses[0]
