"""Where a worker trains, and where the workers meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.job.start import choose_device, meeting_of
from fleet.role_maker.record import RoleRecord


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch see two GPUs; returns the list of chosen indices."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("backend", "selected", "local_rank", "expected"),
    [
        (None, None, 1, "cuda:1"),  # torchrun: by local rank
        (None, None, 3, "cuda:1"),  # more workers than GPUs share them
        ("nccl", "0", 1, "cuda:0"),  # the launcher's choice counts
        ("gloo", "1", 0, "cuda:1"),  # shared by several workers
        ("gloo", None, 0, "cpu"),  # a CPU job on a machine with GPUs
    ],
)
def test_device(gpus: list[int], backend: str | None, selected: str | None, local_rank: int, expected: str) -> None:
    """002-09, C.8: FLAGS_selected_gpus decides, then the local rank; gloo without a card is the CPU."""
    record = RoleRecord(world_size=4, local_rank=local_rank, backend=backend)
    environment = Environment({} if selected is None else {"FLAGS_selected_gpus": selected})
    assert str(choose_device(record, environment)) == expected
    assert gpus == ([] if expected == "cpu" else [int(expected[-1])])


def test_hidden_gpu_is_an_error(gpus: list[int]) -> None:
    """Decision 6: a GPU that was assigned and cannot be seen is an error, not a slow CPU job."""
    with pytest.raises(ConfigError, match="FLAGS_selected_gpus is '2', and torch sees 2"):
        choose_device(RoleRecord(), Environment({"FLAGS_selected_gpus": "2"}))
    assert gpus == []


def test_cpu_machine_ignores_card_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decision 6: --gpus=0,1 on a machine without GPUs trains on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(RoleRecord(backend="gloo"), Environment({"FLAGS_selected_gpus": "1"})).type == "cpu"


def test_meeting() -> None:
    """C.5: the master is the meeting point, timeouts come from the environment, GPUs get NCCL beside gloo."""
    record = RoleRecord(global_rank=1, world_size=2, master="10.0.0.1:6170", generation=3)
    environment = Environment({"PADDLE_PG_TIMEOUT": "5000", "FLAGS_stop_check_timeout": "7"})
    meeting = meeting_of(record, environment, torch.device("cuda", 0))
    assert (meeting.host, meeting.port, meeting.prefix) == ("10.0.0.1", 6170, "3")
    assert (meeting.wait_s, meeting.operation_s, meeting.backend) == (7.0, 5.0, "cpu:gloo,cuda:nccl")
    launched = replace(record, backend="nccl")  # as the launcher says where each worker has a GPU
    assert meeting_of(launched, environment, torch.device("cuda", 0)).backend == "cpu:gloo,cuda:nccl"
    assert meeting_of(replace(record, backend="gloo"), environment, torch.device("cuda", 0)).backend == "gloo"
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        meeting_of(RoleRecord(world_size=2), Environment({}), torch.device("cpu"))


@pytest.mark.parametrize("source", ["srun", "mpirun"])
def test_nodes_that_would_meet_on_themselves_are_refused(source: str) -> None:
    record = RoleRecord(world_size=4, local_world_size=2, num_nodes=2, master="127.0.0.1:6170", source=source)
    with pytest.raises(ConfigError, match="different machine on each. Set MASTER_ADDR"):
        meeting_of(record, Environment({}), torch.device("cpu"))
