"""Role makers: Fleet's objects that answer "who am I", over one immutable record each.

::

    RoleMakerBase
    |- PaddleCloudRoleMaker              asks the environment, at the first question
    `- UserDefinedRoleMaker              is told
       `- UserDefinedCollectiveRoleMaker its 1.x form

Every question exists under its 1.x name (``worker_num``) and with a leading underscore (``_worker_num``), as Fleet's
scripts use both.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from fleet._role_maker_base import RoleMakerBase
from fleet._role_record import USER, Role, RoleRecord, check_endpoints, check_rank, place_by_endpoints
from fleet._starter_ps import has_servers, read_ps
from fleet._starters import read_record
from fleet.env import Environment
from fleet.errors import ConfigError, OptionWarning, UnknownOptionError, UnsupportedOptionError, did_you_mean

__all__ = [
    "GeneralRoleMaker",
    "MPISymetricRoleMaker",
    "PaddleCloudRoleMaker",
    "Role",
    "RoleMakerBase",
    "RoleRecord",
    "UserDefinedCollectiveRoleMaker",
    "UserDefinedRoleMaker",
]


class PaddleCloudRoleMaker(RoleMakerBase):
    """The role that the starter of this process put into the environment, read at the first question.

    Collective: Fleet's launcher, torchrun, Kubeflow, srun and mpirun are understood; without any of them the process
    is alone. Otherwise PADDLE_PSERVERS_IP_PORT_LIST makes it a parameter-server job.

    Args:
        is_collective: workers only, no parameter server.
        environment: the variables to read; ``None`` reads the process environment.
        kwargs: ``init_gloo`` and ``path`` of older scripts; they give a warning, since the environment decides.

    Raises:
        ConfigError: at the first question, when variables are missing or contradict each other.

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
                f"PaddleCloudRoleMaker({', '.join(given)}) changes nothing: PADDLE_WITH_GLOO and PADDLE_GLOO_* say "
                "whether and where host arrays are exchanged.",
                OptionWarning,
                stacklevel=2,
            )
        self._environment = environment if environment is not None else Environment()

    def _generate_role(self) -> RoleRecord:
        if not self._is_collective and has_servers(self._environment):
            return read_ps(self._environment)
        return read_record(self._environment)


class UserDefinedRoleMaker(RoleMakerBase):
    """A role given in code; the environment is not asked.

    Args:
        is_collective: workers only, no parameter server.
        init_gloo: let the processes of a parameter-server job exchange host arrays; they meet in the folder ``path``.
        current_id: rank of this worker, or index of this server.
        role: ``Role.WORKER`` or ``Role.SERVER``.
        worker_num: number of workers; may be left out where ``worker_endpoints`` is given.
        worker_endpoints: host:port of every worker, in rank order; the first is where they meet.
        server_endpoints: host:port of every parameter server.
        path: shared folder for ``init_gloo``.

    Raises:
        ConfigError: a value is wrong or missing. Unlike in Fleet this is said at once, not at the first question.

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
        self._record = self._generate_role()

    def _generate_role(self) -> RoleRecord:
        workers = _endpoints(self, "worker_endpoints", self._given.get("worker_endpoints"))
        servers = _endpoints(self, "server_endpoints", self._given.get("server_endpoints"))
        kind = self._kind(servers)
        worker_num = _number(self, "worker_num", self._given.get("worker_num", len(workers) or 1))
        rank = _number(self, "current_id", self._given.get("current_id", 0))
        if workers and len(workers) != worker_num:
            raise ConfigError(
                f"{type(self).__name__}(worker_num={worker_num!r}) and worker_endpoints with {len(workers)} addresses; "
                "there is one address for each worker."
            )
        if kind is Role.SERVER:
            check_rank(rank, len(servers), "current_id", "the number of server_endpoints")
            check_rank(0, worker_num, "current_id", "worker_num")
        else:
            check_rank(rank, worker_num, "current_id", "worker_num")
        if self._is_collective and worker_num > 1 and not workers:
            raise ConfigError(
                f"{type(self).__name__}(is_collective=True, worker_num={worker_num!r}) needs worker_endpoints: the "
                "workers meet at the first one."
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
        f"{name} belonged to Fleet 1.x and does not exist any more. Use PaddleCloudRoleMaker(is_collective=...), which "
        "also understands mpirun, or UserDefinedRoleMaker."
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
        raise ConfigError(f"{type(maker).__name__}({name}={value!r}) takes a whole number.")
    return value


def _endpoints(maker: RoleMakerBase, name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(f"{type(maker).__name__}({name}={value!r}) takes a list of host:port texts.")
    endpoints = tuple(part.strip() for part in parts)
    check_endpoints(endpoints, name)
    return endpoints
