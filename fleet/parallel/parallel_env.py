"""Rank, size and ParallelEnv: a thin layer over the role record and torch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fleet.env import Environment
from fleet.errors import ConfigError, NotInitializedError
from fleet.job.start import is_on_gpu
from fleet.role_maker.fleet_contract import read_device_ids
from fleet.role_maker.starters import read_record


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Returns the rank of this process in ``group``, in the running job, or as set by the starter of the process.

    Raises:
        NotInitializedError: ``group`` is given and no process group runs.
        ConfigError: the environment contradicts itself.

    Example:
        >>> get_rank()
        0
    """
    return dist.get_rank(group) if _group_runs("get_rank", group) else read_record(Environment()).global_rank


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Returns the number of processes in ``group``, in the running job, or as set by the starter of the process.

    Raises:
        NotInitializedError: ``group`` is given and no process group runs.
        ConfigError: the environment contradicts itself.
    """
    return dist.get_world_size(group) if _group_runs("get_world_size", group) else read_record(Environment()).world_size


def _group_runs(call: str, group: dist.ProcessGroup | None) -> bool:
    runs = dist.is_available() and dist.is_initialized()
    if group is not None and not runs:
        raise NotInitializedError(f"{call}(group=...) needs fleet.init() or fleet.init_parallel_env() first.")
    return runs


class ParallelEnv:
    """What the starter of this process says about it, under the names of ``paddle.distributed.ParallelEnv``.

    As in Paddle, ``local_rank`` is another name for ``rank``, the rank in the whole job. The rank on the node is
    ``fleet.local_rank()``.

    Raises:
        ConfigError: the environment contradicts itself, or FLAGS_nccl_nrings is not 1 to 8.

    Example:
        >>> ParallelEnv().world_size
        1
    """

    def __init__(self, environment: Environment | None = None) -> None:
        self._environment = environment if environment is not None else Environment()
        self._record = read_record(self._environment)
        nrings = self._environment.int("FLAGS_nccl_nrings")
        if not 1 <= nrings <= 8:
            raise ConfigError(f"FLAGS_nccl_nrings is {nrings!r}; it is 1 to 8.")
        self._nrings = nrings

    @property
    def rank(self) -> int:
        """Rank of this process in the job."""
        return self._record.global_rank

    @property
    def world_size(self) -> int:
        """Number of processes in the job."""
        return self._record.world_size

    @property
    def device_type(self) -> str:
        """Kind of the device: "gpu", or "cpu" where torch sees none or the job runs on gloo without a card."""
        return "gpu" if is_on_gpu(self._record, self._environment) else "cpu"

    @property
    def device_id(self) -> int:
        """Index of the device among those that this process sees; 0 on a CPU."""
        selected = read_device_ids(self._environment, "FLAGS_selected_gpus")
        if selected:
            return selected[0]
        return self._record.local_rank % torch.cuda.device_count() if self.device_type == "gpu" else 0

    @property
    def current_endpoint(self) -> str:
        """Address of this process as host:port; empty where the starter gives no list."""
        endpoints = self._record.worker_endpoints
        return endpoints[self._record.global_rank] if endpoints else ""

    @property
    def trainer_endpoints(self) -> list[str]:
        """Addresses of all processes, in rank order; empty where the starter gives no list."""
        return list(self._record.worker_endpoints)

    @property
    def nrings(self) -> int:
        """The value of FLAGS_nccl_nrings; it has no effect, because NCCL decides."""
        return self._nrings

    @property
    def pg_timeout(self) -> int:
        """Timeout of collectives in milliseconds (PADDLE_PG_TIMEOUT)."""
        return self._environment.int("PADDLE_PG_TIMEOUT")

    local_rank = rank
    nranks = world_size
    dev_id = device_id
