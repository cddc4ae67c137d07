"""The role makers: each query, under both of its names, over the record of the role."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from fleet.env import Environment
from fleet.errors import (
    ConfigError,
    NotInitializedError,
    OptionWarning,
    UnknownOptionError,
    UnsupportedOptionError,
    did_you_mean,
)
from fleet.role_maker.fleet_contract import has_servers, read_ps
from fleet.role_maker.record import USER, Role, RoleRecord, check_endpoints, check_rank, place_by_endpoints
from fleet.role_maker.starters import read_record

if TYPE_CHECKING:
    from fleet.job.util import HostArray, UtilBase


class RoleMakerBase:
    """The role of this process, its peers, and collective operations on host arrays among the workers.

    A subclass overrides :meth:`_generate_role`, which returns the record; it is called once.
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
        """Finds the role now rather than at the first query."""
        self.record  # noqa: B018

    @property
    def record(self) -> RoleRecord:
        """The role as one immutable value, found at first use."""
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
        """Sets the object that exchanges arrays; ``fleet.init`` calls this."""
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

    def get_rank(self) -> int:
        """Returns what ``role_id`` returns."""
        return self.role_id()

    def get_size(self) -> int:
        """Returns what ``worker_num`` returns."""
        return self.worker_num()

    def _need_util(self) -> UtilBase:
        if self._util is None:
            raise NotInitializedError("The role maker can exchange data only after fleet.init(role_maker).")
        return self._util


def _add_private_names() -> None:
    """Adds Fleet 2.x's names, with an underscore; they look the query up by name, so an override counts for both."""
    names = [
        "is_worker", "is_server", "is_first_worker", "is_coordinator", "is_heter_worker", "is_non_distributed",
        "worker_index", "server_index", "role_id", "local_rank", "worker_num", "server_num", "node_num",
        "get_trainer_endpoints", "get_pserver_endpoints", "get_local_endpoint", "get_local_device_ids",
        "get_world_device_ids", "all_gather", "all_reduce", "barrier",
    ]  # fmt: skip
    aliases = {f"_{name}": name for name in names}
    aliases |= {"_get_node_num": "node_num", "_get_local_rank": "local_rank", "_get_rank": "role_id"}
    for alias, name in aliases.items():
        setattr(RoleMakerBase, alias, _forwarder(alias, name))


def _forwarder(alias: str, name: str) -> Any:
    def call(self: RoleMakerBase, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    call.__name__ = alias
    call.__qualname__ = f"RoleMakerBase.{alias}"
    call.__doc__ = f"Returns what ``{name}`` returns."
    return call


_add_private_names()


class PaddleCloudRoleMaker(RoleMakerBase):
    """The role that the starter of this process put into the environment, read at the first query.

    Collective: Fleet's launcher, torchrun, Kubeflow, srun and mpirun are supported; without any of them the job is
    this process alone. Otherwise PADDLE_PSERVERS_IP_PORT_LIST makes it a parameter-server job.

    Args:
        is_collective: workers only, no parameter server.
        environment: the variables to read; ``None`` reads the process environment.
        kwargs: ``init_gloo`` and ``path`` from older scripts; they warn, because the environment decides.

    Raises:
        ConfigError: at the first query, when variables are missing or contradict each other.

    Example:
        >>> PaddleCloudRoleMaker(is_collective=True, environment=Environment({})).worker_num()
        1
    """

    def __init__(self, is_collective: bool = False, environment: Environment | None = None, **kwargs: Any) -> None:
        super().__init__(is_collective)
        _check_names(self, kwargs, ("init_gloo", "path"))
        given = [name for name, value in kwargs.items() if value]
        if given:
            warnings.warn(
                f"PaddleCloudRoleMaker({', '.join(given)}) has no effect: PADDLE_WITH_GLOO and PADDLE_GLOO_* set "
                "whether and where host arrays are exchanged.",
                OptionWarning,
                stacklevel=2,
            )
        self._environment = environment if environment is not None else Environment()

    def _generate_role(self) -> RoleRecord:
        # Old scripts omit is_collective in jobs without servers; those have workers only, and are read as such.
        if not self._is_collective and has_servers(self._environment):
            return read_ps(self._environment)
        return read_record(self._environment)


class UserDefinedRoleMaker(RoleMakerBase):
    """A role given in code; the environment is not read.

    Args:
        is_collective: workers only, no parameter server.
        init_gloo: let the processes of a parameter-server job exchange host arrays; ``path`` is their rendezvous.
        current_id: rank of this worker, or index of this server.
        role: ``Role.WORKER`` or ``Role.SERVER``.
        worker_num: number of workers; optional where ``worker_endpoints`` is given.
        worker_endpoints: host:port of every worker, in rank order; the first serves the rendezvous.
        server_endpoints: host:port of every parameter server.
        path: shared folder for ``init_gloo``.

    Raises:
        ConfigError: a value is wrong or missing. Unlike Fleet, which raises at the first query, this raises at once.

    Example:
        >>> role = UserDefinedRoleMaker(current_id=0, role=Role.SERVER, worker_num=2,
        ...                             server_endpoints=["127.0.0.1:36001"])
        >>> role.is_server(), role.worker_num()
        (True, 2)
    """

    def __init__(self, is_collective: bool = False, init_gloo: bool = False, **kwargs: Any) -> None:
        super().__init__(is_collective)
        known = ("current_id", "role", "worker_num", "worker_endpoints", "server_endpoints", "path")
        _check_names(self, kwargs, known)
        if not isinstance(init_gloo, bool):
            raise ConfigError(f"{type(self).__name__}(init_gloo=...) takes True or False, got {init_gloo!r}.")
        path = kwargs.pop("path", None)
        if init_gloo and not is_collective and path is None:
            raise ConfigError(f"{type(self).__name__}(init_gloo=True) needs path=..., a folder all processes share.")
        self._gloo_path = str(path) if init_gloo and path is not None else None
        self._with_gloo = int(init_gloo)
        self._given = kwargs
        # Now, not at the first query: the error then points at the line that passed the wrong argument.
        self._record = self._generate_role()

    def _generate_role(self) -> RoleRecord:
        workers = _endpoints(self, "worker_endpoints", self._given.get("worker_endpoints"))
        servers = _endpoints(self, "server_endpoints", self._given.get("server_endpoints"))
        kind = self._kind(servers)
        worker_num = _number(self, "worker_num", self._given.get("worker_num", len(workers) or 1))
        rank = _number(self, "current_id", self._given.get("current_id", 0))
        if workers and len(workers) != worker_num:
            raise ConfigError(
                f"{type(self).__name__}(worker_num={worker_num!r}) got worker_endpoints with {len(workers)} addresses; "
                "each worker needs one address."
            )
        if kind is Role.SERVER:
            check_rank(rank, len(servers), "current_id", "the number of server_endpoints")
            # A server has no worker's rank; 0 checks only that the job has a worker.
            check_rank(0, worker_num, "current_id", "worker_num")
        else:
            check_rank(rank, worker_num, "current_id", "worker_num")
        if self._is_collective and worker_num > 1 and not workers:
            raise ConfigError(
                f"{type(self).__name__}(is_collective=True, worker_num={worker_num!r}) needs worker_endpoints: the "
                "first one serves the rendezvous."
            )
        record = RoleRecord(
            kind=kind,
            global_rank=rank,
            world_size=worker_num,
            worker_endpoints=workers,
            server_endpoints=servers,
            master=workers[0] if workers else None,
            source=USER,
            with_gloo=self._with_gloo,
            gloo_path=self._gloo_path,
        )
        # Nodes are counted by the workers' addresses, among which a server has no place.
        return place_by_endpoints(record, "worker_endpoints") if workers and kind is Role.WORKER else record

    def _kind(self, servers: tuple[str, ...]) -> Role:
        value = self._given.get("role", Role.WORKER)
        if value not in (Role.WORKER, Role.SERVER):
            raise ConfigError(f"{type(self).__name__}(role={value!r}) takes Role.WORKER or Role.SERVER.")
        kind = Role(value)
        if self._is_collective and (kind is Role.SERVER or servers):
            raise ConfigError(f"{type(self).__name__}(is_collective=True) has workers only; servers need False.")
        if kind is Role.SERVER and not servers:
            raise ConfigError(f"{type(self).__name__}(role=Role.SERVER) needs server_endpoints.")
        return kind


class UserDefinedCollectiveRoleMaker(UserDefinedRoleMaker):
    """The 1.x form of a collective role given in code.

    Example:
        >>> UserDefinedCollectiveRoleMaker(1, ["10.0.0.1:6170", "10.0.0.2:6170"]).worker_index()
        1
    """

    def __init__(self, current_id: int = 0, worker_endpoints: Sequence[str] | None = None) -> None:
        super().__init__(is_collective=True, current_id=current_id, worker_endpoints=worker_endpoints)


class GeneralRoleMaker(RoleMakerBase):
    """Refused: the role maker of Fleet 1.x's PSLib jobs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("GeneralRoleMaker")


class MPISymetricRoleMaker(RoleMakerBase):
    """Refused: the role maker of Fleet 1.x that ran a worker and a server in each MPI process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("MPISymetricRoleMaker")


def _refuse(name: str) -> NoReturn:
    raise UnsupportedOptionError(
        f"{name} belonged to Fleet 1.x and no longer exists. Use PaddleCloudRoleMaker(is_collective=...), which "
        "also supports mpirun, or UserDefinedRoleMaker."
    )


def _check_names(maker: RoleMakerBase, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise UnknownOptionError(
                f"{type(maker).__name__}({name}=...) is not an argument.{did_you_mean(name, known)} "
                f"It takes {', '.join(known)}."
            )


def _number(maker: RoleMakerBase, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{type(maker).__name__}({name}={value!r}) takes an integer.")
    return value


def _endpoints(maker: RoleMakerBase, name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"{type(maker).__name__}({name}={value!r}) takes a list of host:port strings.")
    endpoints = tuple(part.strip() for part in parts)
    check_endpoints(endpoints, name)
    return endpoints
