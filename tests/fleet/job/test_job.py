"""A job knows who this worker is and what it trains, without a session."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleet.job.job import Job
from fleet.job.wrapped_model import WrappedModel
from fleet.options import DistributedStrategy
from fleet.role_maker.record import RoleRecord


def test_a_job_without_servers_and_groups() -> None:
    job = Job(record=RoleRecord(), device=torch.device("cpu"), options=DistributedStrategy(), say=print)
    assert job.roll_call is job.host_group is job.model is None
    assert not job.has_group
    assert not job.meet_at_server()
    assert (job.data_rank, job.data_replicas) == (0, 1)
    net = nn.Linear(2, 1)
    job.optimizers = [torch.optim.SGD(net.parameters(), 0.1)]
    assert [len(parameters) for parameters in job.parameter_sets()] == [2, 2]
    assert job.has_equal_gradients([])


def test_a_wrapped_model_has_a_module() -> None:
    with pytest.raises(NotImplementedError):
        WrappedModel().exchanged_parameters()
