"""Where a worker stands: along the axes of a collective job, by its rank in a job with servers."""

from __future__ import annotations

import torch

from fleet.job.axes import Axes
from fleet.job.job_workers import Workers
from fleet.role_maker.record import RoleRecord

HOST = torch.device("cpu")


def test_workers_of_one_copy_read_the_same_rows() -> None:
    record = RoleRecord(global_rank=3, world_size=4, master="127.0.0.1:1")
    workers = Workers(record=record, device=HOST, axes=Axes({"dp": 2, "mp": 2}, 3))
    assert (workers.data_rank, workers.data_replicas) == (1, 2)
    assert workers.who == "[rank 3 of 4, dp 1, mp 1]"
    workers.collective = False
    assert (workers.data_rank, workers.data_replicas, workers.who) == (3, 4, "[rank 3 of 4]")


def test_a_worker_alone_meets_nobody() -> None:
    workers = Workers(record=RoleRecord(), device=HOST)
    workers.meet("fleet.save()")
    assert (workers.roll_call, workers.host_group, workers.has_group) == (None, None, False)
