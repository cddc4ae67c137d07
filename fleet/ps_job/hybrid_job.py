"""A worker of a hybrid job: beside the servers it has the other workers, with which it averages dense gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from fleet.errors import ConfigError
from fleet.ps.client.client import Client
from fleet.ps.worker.connection import TrainerConfig, WorkerConnection
from fleet.ps.worker.dense_exchange import ProcessGroupTrainers, SingleTrainer, TrainerGroup
from fleet.ps.worker.hybrid_model import HybridModel
from fleet.ps.worker.hybrid_trainer import HybridTrainer
from fleet.ps.worker.table_plan import TablePlan

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from fleet.job.job import Job

__all__ = ["make_hybrid_trainer", "meet_trainers"]


def make_hybrid_trainer(
    job: Job, plan: TablePlan, config: TrainerConfig, make_client: Callable[[int], Client], optimizer: Optimizer
) -> HybridTrainer:
    """Returns a trainer that is not open yet, after all workers of the job have met."""
    # A trainer that finds a NaN tells the others instead of letting them wait, however the check was asked for.
    checks = config.check_finite or any(strategy.name == "check_nan_inf" for strategy in job.strategies)
    config = replace(config, check_finite=checks)
    connection = WorkerConnection(plan, config, make_client, exchanged=TablePlan(sparse=plan.sparse))
    return HybridTrainer(HybridModel(connection, optimizer, meet_trainers(job)))


def meet_trainers(job: Job) -> TrainerGroup:
    """Returns the workers of the job as a group: gloo on the host, NCCL on GPUs.

    Raises:
        ConfigError: no rendezvous address is set.
        RendezvousError: not all have come in time.
    """
    if job.world_size == 1:
        return SingleTrainer()
    if job.meet_workers is None:
        raise ConfigError(
            f"hybrid_configs['dp_degree'] is {job.world_size}: the workers average dense gradients among "
            "themselves, and nothing says where they meet. Set PADDLE_MASTER to the same host:port on all of them, a "
            "free port of worker 0's machine; the launcher does it."
        )
    group = job.meet_workers(job.device)
    on_host = "nccl" not in str(dist.get_backend_config(group))
    if job.device.type == "cuda" and on_host and job.record.backend in (None, "auto", "nccl"):
        group = dist.new_group(backend="nccl")  # they met for host arrays before
    return ProcessGroupTrainers(group)
