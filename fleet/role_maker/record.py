"""RoleRecord: the role of this process in the job, as one immutable, consistent value.

Standard library only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import IntEnum

from fleet.common.addresses import is_loopback, split_endpoint
from fleet.errors import ConfigError

SINGLE = "single process"
USER = "user defined"


class Role(IntEnum):
    """The part of a process in the job; the numbers are Fleet's."""

    WORKER = 1
    SERVER = 2
    HETER_WORKER = 3
    ALL = 4
    COORDINATOR = 5


@dataclass(frozen=True, kw_only=True)
class RoleRecord:
    """The role of this process, its peers, and their rendezvous.

    ``global_rank`` counts within the role: on a parameter server it is the index among the servers. ``world_size`` is
    the number of workers for every role. ``master`` is the host:port of the rendezvous, ``None`` in a single
    process. ``agent_store`` says that the starter already serves the store there (torchrun); otherwise rank 0 does.
    ``generation`` counts restarts of the job. ``source`` names the starter: "fleet launcher", "torchrun", "kubeflow",
    "torch variables" (RANK and WORLD_SIZE set by someone else), "srun", "mpirun", "user defined" (a role maker with
    given values) or "single process".
    """

    kind: Role = Role.WORKER
    global_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    worker_endpoints: tuple[str, ...] = ()
    server_endpoints: tuple[str, ...] = ()
    num_nodes: int = 1
    local_device_ids: tuple[int, ...] = ()
    world_device_ids: tuple[int, ...] = ()
    backend: str | None = None
    master: str | None = None
    source: str = SINGLE
    agent_store: bool = False
    generation: int = 0
    with_gloo: int = 0  # parameter server: 0 none, 1 workers, 2 workers and servers exchange host arrays
    gloo_path: str | None = None  # shared folder that replaces ``master`` as the rendezvous

    @property
    def master_host(self) -> str:
        """Host part of ``master``; loopback in a single process."""
        return split_endpoint(self.master, "master")[0] if self.master else "127.0.0.1"

    @property
    def master_port(self) -> int:
        """Port of ``master``; 0 in a single process."""
        return split_endpoint(self.master, "master")[1] if self.master else 0


def read_hosts(endpoints: tuple[str, ...], name: str) -> list[str]:
    """Returns the host of each endpoint, in order; raises ConfigError for a malformed one."""
    return [split_endpoint(endpoint, name)[0] for endpoint in endpoints]


def place_by_endpoints(record: RoleRecord, name: str) -> RoleRecord:
    """Returns ``record`` with local rank, local size and node count derived from its worker endpoints."""
    hosts = read_hosts(record.worker_endpoints, name)
    own = hosts[record.global_rank]
    return replace(
        record,
        local_rank=hosts[: record.global_rank].count(own),
        local_world_size=hosts.count(own),
        num_nodes=len(set(hosts)),
    )


def place_by_numbers(record: RoleRecord, local: tuple[int | None, int | None], names: tuple[str, str]) -> RoleRecord:
    """Returns ``record`` with local rank, local size and node count where there is no endpoint list.

    ``local`` holds the starter's local rank and size, ``names`` their variables. Without them, all workers are on this
    node if the rendezvous is at a loopback address; otherwise each node has one worker.

    Raises ConfigError when only one of the two is known, or when they do not match.
    """
    local_rank, local_size = local
    if local_size is None:
        if record.world_size == 1 or is_loopback(record.master_host):
            local_size = record.world_size
            local_rank = record.global_rank if local_rank is None else local_rank
        elif local_rank is None:
            local_rank = 0
            local_size = 1
    if local_rank is None or local_size is None:
        known, missing = names if local_rank is not None else names[::-1]
        raise ConfigError(f"{known} is set and {missing} is not; both are needed. Set {missing}.")
    check_rank(local_rank, local_size, *names)
    if local_size > record.world_size:
        raise ConfigError(
            f"{names[1]} is {local_size!r} and the job has {record.world_size!r} workers; a node cannot hold more "
            "workers than the job."
        )
    num_nodes = -(-record.world_size // local_size)
    return replace(record, local_rank=local_rank, local_world_size=local_size, num_nodes=num_nodes)


def check_rank(rank: int, world_size: int, rank_name: str, world_name: str) -> None:
    """Raises ConfigError unless ``0 <= rank < world_size``; the names are the variables that the user can change."""
    if world_size < 1:
        raise ConfigError(f"{world_name} is {world_size!r}; a job has at least one process.")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{rank_name} is {rank!r} and {world_name} is {world_size!r}; a rank is between 0 and {world_size - 1}. "
            "Start every process of the job with the same number of processes."
        )


def check_endpoints(endpoints: tuple[str, ...], name: str) -> None:
    """Raises ConfigError for a malformed or duplicate endpoint."""
    read_hosts(endpoints, name)
    twice = sorted(endpoint for endpoint, count in Counter(endpoints).items() if count > 1)
    if twice:
        raise ConfigError(f"{name} holds {twice!r} more than once; every process needs a different address.")
