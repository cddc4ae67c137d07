"""RoleMakerBase: the questions every role maker answers, under Fleet's 1.x and 2.x names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet._role_record import Role, RoleRecord
from fleet.errors import ConfigError, NotInitializedError

if TYPE_CHECKING:
    from fleet._util import HostArray, UtilBase


class RoleMakerBase:
    """Who this process is, who the others are, and collective operations on host arrays among the workers.

    A subclass overrides :meth:`_generate_role`, which returns the record; it is asked once.
    """

    def __init__(self, is_collective: bool = False) -> None:
        if not isinstance(is_collective, bool):
            raise ConfigError(f"{type(self).__name__}(is_collective=...) takes True or False, got {is_collective!r}.")
        self._is_collective = is_collective
        self._record: RoleRecord | None = None
        self._util: UtilBase | None = None

    def _generate_role(self) -> RoleRecord:
        raise NotImplementedError(f"{type(self).__name__} does not say how to find its role")

    def generate_role(self) -> None:
        """Finds the role now rather than at the first question."""
        self.record  # noqa: B018

    @property
    def record(self) -> RoleRecord:
        """The role as one immutable value; found at the first use."""
        if self._record is None:
            self._record = self._generate_role()
        return self._record

    @property
    def is_collective(self) -> bool:
        """Whether the job has workers only."""
        return self._is_collective

    # ---- who am I ------------------------------------------------------------------------------------------------

    def is_worker(self) -> bool:
        """Returns whether this process trains."""
        return self.record.kind is Role.WORKER

    def is_server(self) -> bool:
        """Returns whether this process is a parameter server."""
        return self.record.kind is Role.SERVER

    def is_first_worker(self) -> bool:
        """Returns whether this process is worker 0."""
        return self.is_worker() and self.record.global_rank == 0

    def is_coordinator(self) -> bool:
        """Returns whether this process is a coordinator of a federated job; such jobs are refused."""
        return self.record.kind is Role.COORDINATOR

    def is_heter_worker(self) -> bool:
        """Returns whether this process is a stage of a heterogeneous job; such jobs are refused."""
        return self.record.kind is Role.HETER_WORKER

    def worker_index(self) -> int:
        """Returns the rank of this worker."""
        return self.record.global_rank

    def server_index(self) -> int:
        """Returns the index of this parameter server."""
        return self.record.global_rank

    def role_id(self) -> int:
        """Returns the rank within the role: the worker's rank or the server's index."""
        return self.record.global_rank

    def local_rank(self) -> int:
        """Returns the rank of this worker on its node."""
        return self.record.local_rank

    # ---- who are the others --------------------------------------------------------------------------------------

    def worker_num(self) -> int:
        """Returns the number of workers."""
        return self.record.world_size

    def server_num(self) -> int:
        """Returns the number of parameter servers."""
        return len(self.record.server_endpoints)

    def node_num(self) -> int:
        """Returns the number of hosts the workers run on."""
        return self.record.num_nodes

    def get_trainer_endpoints(self) -> list[str]:
        """Returns host:port of every worker, in rank order; empty where the starter gives no list."""
        return list(self.record.worker_endpoints)

    def get_pserver_endpoints(self) -> list[str]:
        """Returns host:port of every parameter server."""
        return list(self.record.server_endpoints)

    def get_local_endpoint(self) -> str:
        """Returns host:port of this process; empty where the starter gives no list."""
        endpoints = self.record.server_endpoints if self.is_server() else self.record.worker_endpoints
        return endpoints[self.record.global_rank] if endpoints else ""

    def get_local_device_ids(self) -> list[int]:
        """Returns the device ids of this worker."""
        return list(self.record.local_device_ids)

    def get_world_device_ids(self) -> list[int]:
        """Returns the device ids of every worker."""
        return list(self.record.world_device_ids)

    def is_non_distributed(self) -> bool:
        """Returns whether this process is the whole job."""
        return self.record.world_size == 1 and not self.record.server_endpoints

    def to_string(self) -> str:
        """Returns role, id and addresses in one line."""
        return (
            f"role: {self.record.kind.name}, current_id: {self.record.global_rank}, "
            f"worker_num: {self.record.world_size}, worker_endpoints: {self.get_trainer_endpoints()}, "
            f"server_endpoints: {self.get_pserver_endpoints()}"
        )

    # ---- among the workers ---------------------------------------------------------------------------------------

    def set_util(self, util: UtilBase) -> None:
        """Hands the role maker what it exchanges arrays with; ``fleet.init`` does so."""
        self._util = util

    def all_gather(self, input: Any, comm_world: str = "worker") -> list[HostArray]:
        """Returns ``input`` of every worker, in rank order."""
        return self._need_util().all_gather(input, comm_world)

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> HostArray:
        """Returns the sum, minimum or maximum of ``input`` over the workers."""
        return self._need_util().all_reduce(input, mode, comm_world)

    def barrier(self, comm_world: str = "worker") -> None:
        """Returns when every worker has called it."""
        self._need_util().barrier(comm_world)

    def barrier_worker(self) -> None:
        """Returns when every worker has called it."""
        self.barrier("worker")

    def barrier_all(self) -> None:
        """Returns when every worker and server has called it."""
        self.barrier("all")

    def _need_util(self) -> UtilBase:
        if self._util is None:
            raise NotInitializedError("The role maker exchanges data only after fleet.init(role_maker).")
        return self._util


def _add_private_names() -> None:
    """Fleet 2.x spells every question with a leading underscore; those call whatever a subclass overrides."""
    names = [
        "is_worker", "is_server", "is_first_worker", "is_coordinator", "is_heter_worker", "is_non_distributed",
        "worker_index", "server_index", "role_id", "local_rank", "worker_num", "server_num", "node_num",
        "get_trainer_endpoints", "get_pserver_endpoints", "get_local_endpoint", "get_local_device_ids",
        "get_world_device_ids", "all_gather", "all_reduce", "barrier",
    ]  # fmt: skip
    aliases = {f"_{name}": name for name in names}
    aliases |= {"_get_node_num": "node_num", "_get_local_rank": "local_rank", "_get_rank": "role_id"}
    aliases |= {"get_rank": "role_id", "get_size": "worker_num"}
    for alias, name in aliases.items():
        setattr(RoleMakerBase, alias, _forwarder(alias, name))


def _forwarder(alias: str, name: str) -> Any:
    def call(self: RoleMakerBase, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    call.__name__, call.__qualname__ = alias, f"RoleMakerBase.{alias}"
    call.__doc__ = f"Returns what ``{name}`` returns."
    return call


_add_private_names()
