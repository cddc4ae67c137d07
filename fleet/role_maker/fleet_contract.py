"""Fleet's contracts, for a collective worker and for a parameter-server job.

A worker reads PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ENDPOINTS ...; a process of a parameter-server job
PADDLE_PSERVERS_IP_PORT_LIST, TRAINING_ROLE, PADDLE_TRAINERS_NUM ...

Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

from fleet.common.addresses import join_endpoint, split_endpoint
from fleet.common.plain_files import open_to_read
from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.role_maker.record import (
    Role,
    RoleRecord,
    check_endpoints,
    check_rank,
    place_by_endpoints,
    place_by_numbers,
    read_hosts,
)

_RANK = ("PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK")
_WORLD = ("PADDLE_TRAINERS_NUM", "PADDLE_GLOBAL_SIZE")
_LOCAL_RANK = ("PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "LOCAL_RANK")
_LOCAL_SIZE = ("PADDLE_LOCAL_SIZE", "LOCAL_WORLD_SIZE")
_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
_MAX_SAVED = 1 << 26
_STANDBYS = "FLEET_PS_STANDBY_ENDPOINTS"
_SHARDS = "FLEET_PS_SHARD_ENDPOINTS"
_SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
_GLOO_OFFSET = 18
_ROLE_NAMES = ("TRAINING_ROLE", "PADDLE_TRAINING_ROLE", "PADDLE_ROLE")
_ROLES = {
    "TRAINER": Role.WORKER,
    "PSERVER": Role.SERVER,
    "HETER_TRAINER": Role.HETER_WORKER,
    "HETER": Role.HETER_WORKER,  # the Kubernetes operator's spelling
    "COORDINATOR": Role.COORDINATOR,
}


def fleet_variables(env: Environment) -> list[str]:
    """Returns Fleet's worker variables that are set; empty when Fleet's launcher did not start this process."""
    return [name for name in (*_RANK, *_WORLD, _ENDPOINTS) if env.has(name)]


def read_fleet(env: Environment) -> RoleRecord:
    """Returns the record that Fleet's contract describes.

    Without an endpoint list, the number of workers comes from PADDLE_TRAINERS_NUM and the rendezvous address from
    PADDLE_MASTER or MASTER_ADDR and MASTER_PORT. Torch's RANK, WORLD_SIZE and MASTER_ADDR, when set, must agree
    with Fleet's.

    Raises:
        ConfigError: a variable is missing or two contradict each other; the message names them.
    """
    check_collective_role(env)
    endpoints = read_list(env, _ENDPOINTS)
    rank, world_size = _rank_and_world(env, endpoints)
    _check_torch_agrees(env, rank, world_size)
    record = RoleRecord(
        global_rank=rank,
        world_size=world_size,
        worker_endpoints=endpoints,
        local_device_ids=read_device_ids(env, "PADDLE_LOCAL_DEVICE_IDS", "FLAGS_selected_gpus"),
        world_device_ids=read_device_ids(env, "PADDLE_WORLD_DEVICE_IDS"),
        backend=env.raw("PADDLE_DISTRI_BACKEND"),
        master=_master(env, endpoints, world_size),
        source="fleet launcher",
        agent_store=env.bool("TORCHELASTIC_USE_AGENT_STORE"),
        generation=env.int("FLEET_GENERATION") or env.int("TORCHELASTIC_RESTART_COUNT"),
    )
    local = agreed_int(env, _LOCAL_RANK), agreed_int(env, _LOCAL_SIZE)
    if not endpoints:
        record = place_by_numbers(record, local, ("PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE"))
        return replace(record, num_nodes=_num_nodes(env) or record.num_nodes)
    _check_own_endpoint(env, record)
    return _with_local_place(place_by_endpoints(record, _ENDPOINTS), *local)


def check_collective_role(env: Environment) -> None:
    """Raises ConfigError when the variables say that this process is a parameter server."""
    for name in ("PADDLE_TRAINING_ROLE", "TRAINING_ROLE"):
        role = env.raw(name)
        if role is not None and role.strip().upper() != "TRAINER":
            raise ConfigError(
                f"{name} is {role!r} and the job is collective (is_collective=True); a collective job has only "
                "TRAINER processes. Unset it, or call fleet.init() without is_collective for a parameter-server job."
            )


def read_list(env: Environment, name: str) -> tuple[str, ...]:
    """Returns a comma-separated variable; a list too long for the environment stands in PADDLE_BACKUP_ENV_PATH."""
    values = env.list(name)
    path = env.raw("PADDLE_BACKUP_ENV_PATH")
    if values or path is None:
        return tuple(values)
    try:
        with open_to_read(os.path.realpath(path)) as file:
            # A longer file is cut off and fails as JSON; a FIFO or an endless file cannot fill the memory.
            saved = json.loads(file.read(_MAX_SAVED))
    except FileNotFoundError:
        raise ConfigError(f"PADDLE_BACKUP_ENV_PATH names {path!r}, and there is no such file.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"PADDLE_BACKUP_ENV_PATH names {path!r}, which cannot be read as JSON: {error}.") from error
    text = saved.get(name, "") if isinstance(saved, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"PADDLE_BACKUP_ENV_PATH names {path!r}; it holds one object of variable names and strings.")
    return tuple(Environment({name: text}).list(name))


def read_device_ids(env: Environment, *names: str) -> tuple[int, ...]:
    """Returns the device numbers in the first of ``names`` that is set; colons join the devices of one worker."""
    for name in names:
        parts = [part for item in env.list(name) for part in item.split(":")]
        if parts:
            try:
                return tuple(int(part) for part in parts)
            except ValueError:
                raise ConfigError(f"{name} is {env.raw(name)!r}; it takes device numbers.") from None
    return ()


def agreed_int(env: Environment, names: tuple[str, ...]) -> int | None:
    """Returns the common value of the variables ``names``; ``None`` when none is set."""
    found = {name: env.int(name) for name in names if env.has(name)}
    if len(set(found.values())) > 1:
        raise ConfigError(f"{found!r} contradict each other in the environment. Unset the wrong one.")
    return next(iter(found.values()), None)


def _rank_and_world(env: Environment, endpoints: tuple[str, ...]) -> tuple[int, int]:
    rank = agreed_int(env, _RANK)
    world_size = agreed_int(env, _WORLD)
    check_endpoints(endpoints, _ENDPOINTS)
    if world_size is None:
        world_size = max(len(endpoints), 1)
    elif endpoints and len(endpoints) != world_size:
        raise ConfigError(
            f"PADDLE_TRAINERS_NUM is {world_size!r} and {_ENDPOINTS} lists {len(endpoints)} addresses; it must list "
            "one for each worker."
        )
    if rank is None:
        if world_size > 1:
            raise ConfigError(
                f"The job has {world_size} workers ({', '.join(fleet_variables(env))}) and PADDLE_TRAINER_ID is not "
                "set. Start the script with python -m fleet.launch, which sets it for each worker."
            )
        rank = 0
    check_rank(rank, world_size, "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    return rank, world_size


def _check_torch_agrees(env: Environment, rank: int, world_size: int) -> None:
    pairs = (("RANK", rank, "PADDLE_TRAINER_ID"), ("WORLD_SIZE", world_size, "PADDLE_TRAINERS_NUM"))
    # WORLD_SIZE alone may be left over in a shell; without a rank it says nothing about this process.
    if not env.has("RANK"):
        return
    for name, value, fleet_name in pairs:
        if env.has(name) and env.int(name) != value:
            raise ConfigError(
                f"{name} is {env.raw(name)!r} and Fleet's {fleet_name} says {value}. If another launcher (torchrun) "
                f"runs inside Fleet's or the operator's environment, unset {', '.join(fleet_variables(env))} before "
                "it; otherwise unset RANK and WORLD_SIZE."
            )


def _master(env: Environment, endpoints: tuple[str, ...], world_size: int) -> str | None:
    fleet_master = _fleet_master(env)
    torch_master = _torch_master(env)
    if fleet_master and torch_master and fleet_master != torch_master:
        raise ConfigError(
            f"PADDLE_MASTER is {fleet_master!r} and MASTER_ADDR with MASTER_PORT is {torch_master!r}; both name the "
            "rendezvous address and must agree. Unset the wrong one."
        )
    # With neither address the workers meet at the endpoint of rank 0.
    master = torch_master or fleet_master or (endpoints[0] if endpoints else None)
    if master is None and world_size > 1:
        # The variable hints at a parameter-server job whose list of servers is missing. Advice about a rendezvous
        # address alone would mislead its user.
        if env.has("TRAINING_ROLE"):
            raise ConfigError(
                f"TRAINING_ROLE is {env.raw('TRAINING_ROLE')!r} and PADDLE_TRAINERS_NUM is {world_size!r}, but "
                "PADDLE_PSERVERS_IP_PORT_LIST is not set, so this process has no parameter servers. Set it to ip:port "
                "of every server, the same in each process; a collective job needs PADDLE_MASTER, host:port of rank 0."
            )
        raise ConfigError(
            f"PADDLE_TRAINERS_NUM is {world_size!r} and no rendezvous address is set: PADDLE_MASTER, "
            f"MASTER_ADDR with MASTER_PORT, and {_ENDPOINTS} are not set. Start the script with "
            "python -m fleet.launch, or set PADDLE_MASTER to host:port of worker 0."
        )
    if master is not None:
        split_endpoint(master, "PADDLE_MASTER")
    return master


def _fleet_master(env: Environment) -> str | None:
    """Returns PADDLE_MASTER as host:port; a URL is the launchers' meeting point, where no worker listens."""
    text = env.raw("PADDLE_MASTER")
    return None if text is None or "://" in text else text.strip()


def _torch_master(env: Environment) -> str | None:
    address = env.raw("MASTER_ADDR")
    return join_endpoint(address.strip(), env.int("MASTER_PORT")) if address and env.has("MASTER_PORT") else None


def _check_own_endpoint(env: Environment, record: RoleRecord) -> None:
    own = env.raw("PADDLE_CURRENT_ENDPOINT")
    expected = record.worker_endpoints[record.global_rank]
    if own is not None and own.strip() != expected:
        raise ConfigError(
            f"PADDLE_CURRENT_ENDPOINT is {own!r} and {_ENDPOINTS} gives {expected!r} to PADDLE_TRAINER_ID "
            f"{record.global_rank}. Unset it, or correct the list."
        )


def _with_local_place(record: RoleRecord, local_rank: int | None, local_size: int | None) -> RoleRecord:
    """Returns ``record`` with the starter's local rank and size in place of those that the endpoints suggest."""
    local_rank = record.local_rank if local_rank is None else local_rank
    local_size = record.local_world_size if local_size is None else local_size
    check_rank(local_rank, local_size, "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE")
    return replace(record, local_rank=local_rank, local_world_size=local_size)


def _num_nodes(env: Environment) -> int:
    """Returns the starter's number of nodes; 0 when it gives none."""
    hosts = env.list("PADDLE_TRAINERS")
    if hosts:
        return len(set(hosts))
    # An elastic job sets a range such as 2:4, which is no number of nodes.
    text = (env.raw("PADDLE_NNODES") or "").strip()
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def has_servers(env: Environment) -> bool:
    """Returns whether the environment describes a parameter-server job; refuses a server without its list."""
    if read_list(env, _SERVERS):
        return True
    name = next((name for name in _ROLE_NAMES if env.has(name)), _ROLE_NAMES[0])
    if env.str(name).strip().upper() == "PSERVER":
        raise ConfigError(
            f"{name} is {env.raw(name)!r} and {_SERVERS} is not set; it lists ip:port of every server, comma-separated."
        )
    return False


def read_ps(env: Environment) -> RoleRecord:
    """Returns the record of a worker or server of a parameter-server job.

    A worker needs PADDLE_TRAINER_ID; POD_IP and PADDLE_PORT are for servers only.

    Raises:
        ConfigError: a variable is missing or wrong; the message names it.
        UnsupportedOptionError: the role is HETER_TRAINER or COORDINATOR.
    """
    servers = read_list(env, _SERVERS)
    check_endpoints(servers, _SERVERS)
    if not env.has("PADDLE_TRAINERS_NUM"):
        raise ConfigError(f"PADDLE_TRAINERS_NUM is not set in a parameter-server job ({_SERVERS} is set). Set it.")
    world_size = env.int("PADDLE_TRAINERS_NUM")
    check_rank(0, world_size, "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    kind = _read_role(env)
    endpoints = read_list(env, _ENDPOINTS)
    check_endpoints(endpoints, _ENDPOINTS)
    if endpoints and len(endpoints) != world_size:
        raise ConfigError(
            f"PADDLE_TRAINERS_NUM is {world_size!r} and {_ENDPOINTS} lists {len(endpoints)} addresses; it must list "
            "one for each worker."
        )
    rank = _worker_rank(env, world_size) if kind is Role.WORKER else _server_index(env, _listed_servers(env, servers))
    with_gloo, master, gloo_path = _gloo(env)
    if with_gloo and master is not None:
        master = _beside_worker_0(master, servers, endpoints)
    record = RoleRecord(
        kind=kind,
        global_rank=rank,
        world_size=world_size,
        worker_endpoints=endpoints,
        server_endpoints=servers,
        num_nodes=len(set(env.list("PADDLE_TRAINERS") or read_hosts(endpoints, _ENDPOINTS))) or 1,
        local_device_ids=read_device_ids(env, "PADDLE_LOCAL_DEVICE_IDS", "FLAGS_selected_gpus"),
        world_device_ids=read_device_ids(env, "PADDLE_WORLD_DEVICE_IDS"),
        backend=env.raw("PADDLE_DISTRI_BACKEND"),
        master=master,
        source="fleet launcher",
        generation=env.int("FLEET_GENERATION"),
        with_gloo=with_gloo,
        gloo_path=gloo_path,
    )
    return place_by_endpoints(record, _ENDPOINTS) if endpoints and kind is Role.WORKER else record


def _read_role(env: Environment) -> Role:
    name = next((name for name in _ROLE_NAMES if env.has(name)), None)
    choices = "TRAINER or PSERVER"
    if name is None:
        raise ConfigError(f"TRAINING_ROLE is not set in a parameter-server job ({_SERVERS} is set); it is {choices}.")
    kind = _ROLES.get(env.str(name).strip().upper())
    if kind is None:
        raise ConfigError(f"{name} is {env.raw(name)!r}; it is {choices}.")
    if kind is Role.HETER_WORKER:
        raise UnsupportedOptionError(
            f"{name} is {env.raw(name)!r}: heterogeneous jobs of CPU and GPU workers are not supported. Use {choices}; "
            "TRAINER workers may use GPUs."
        )
    if kind is Role.COORDINATOR:
        raise UnsupportedOptionError(
            f"{name} is {env.raw(name)!r}: federated jobs with a coordinator are not supported. Use {choices}."
        )
    return kind


def _worker_rank(env: Environment, world_size: int) -> int:
    if env.bool("FLEET_PS_STANDBY"):
        raise ConfigError(
            f"FLEET_PS_STANDBY is {env.raw('FLEET_PS_STANDBY')!r} in the environment of a worker; it is for the "
            "processes of standbys alone. Unset it here."
        )
    if not env.has("PADDLE_TRAINER_ID"):
        raise ConfigError("PADDLE_TRAINER_ID is not set; every TRAINER has its own, from 0.")
    rank = env.int("PADDLE_TRAINER_ID")
    check_rank(rank, world_size, "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM")
    return rank


def _listed_servers(env: Environment, servers: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the list that holds this process's own endpoint: the standbys for a standby, otherwise the servers.

    Raises:
        ConfigError: the standbys' list does not fit the servers'.
    """
    # The first address of each group is the POD_IP:PADDLE_PORT of that server process.
    if env.has(_SHARDS):
        return tuple(group.split(",")[0].strip() for group in env.str(_SHARDS).split(";"))
    standbys = read_list(env, _STANDBYS)
    distinct = len({*servers, *standbys})
    if standbys and (len(standbys) != len(servers) or distinct < 2 * len(servers)):
        raise ConfigError(
            f"{_STANDBYS}={','.join(standbys)!r} and {_SERVERS}={','.join(servers)!r}: give each server one standby, "
            "at an endpoint of its own."
        )
    if not env.bool("FLEET_PS_STANDBY"):
        return servers
    if not standbys:
        raise ConfigError(f"FLEET_PS_STANDBY is 1 and {_STANDBYS} is not set; it lists ip:port of every standby.")
    return standbys


def _server_index(env: Environment, servers: tuple[str, ...]) -> int:
    """Returns the position of POD_IP:PADDLE_PORT in the list.

    The Kubernetes operator can set a PADDLE_PORT that is not in its list. Then PADDLE_TRAINER_ID is the position, and
    the port in the list, which the workers connect to, is the right one.
    """
    for name in ("POD_IP", "PADDLE_PORT"):
        if not env.has(name):
            raise ConfigError(f"{name} is not set; a PSERVER finds its entry in {_SERVERS} by POD_IP and PADDLE_PORT.")
    host = env.str("POD_IP").strip()
    port = env.int("PADDLE_PORT")
    own = split_endpoint(join_endpoint(host, port), "POD_IP:PADDLE_PORT")
    places = [split_endpoint(server, _SERVERS) for server in servers]
    if own in places:
        return places.index(own)
    same_host = [index for index, place in enumerate(places) if place[0] == host]
    if len(same_host) == 1 and env.has("PADDLE_TRAINER_ID") and env.int("PADDLE_TRAINER_ID") == same_host[0]:
        return same_host[0]
    name = _SHARDS if env.has(_SHARDS) else _STANDBYS if env.bool("FLEET_PS_STANDBY") else _SERVERS
    raise ConfigError(
        f"POD_IP:PADDLE_PORT is {join_endpoint(host, port)!r}, which is not in {name}={','.join(servers)!r}. "
        "Correct one of the three."
    )


def _gloo(env: Environment) -> tuple[int, str | None, str | None]:
    """Returns the switch for host collectives, and their rendezvous: host:port or a shared folder."""
    with_gloo = env.int("PADDLE_WITH_GLOO")
    if with_gloo not in (0, 1, 2):
        raise ConfigError(f"PADDLE_WITH_GLOO is {with_gloo!r}; it is 0 (off), 1 (workers) or 2 (workers and servers).")
    if with_gloo == 0:
        return 0, env.raw("PADDLE_MASTER"), None
    rendezvous = env.int("PADDLE_GLOO_RENDEZVOUS")
    if rendezvous == 1:
        raise UnsupportedOptionError("PADDLE_GLOO_RENDEZVOUS is 1 (HDFS), which is not supported; use 2 or 3.")
    if rendezvous not in (2, 3):
        raise ConfigError(f"PADDLE_GLOO_RENDEZVOUS is {rendezvous!r}; it is 2 (shared folder) or 3 (host:port).")
    if rendezvous == 2:
        if not env.has("PADDLE_GLOO_FS_PATH"):
            raise ConfigError("PADDLE_GLOO_FS_PATH is not set; with PADDLE_GLOO_RENDEZVOUS=2 it is the shared folder.")
        return with_gloo, None, env.str("PADDLE_GLOO_FS_PATH")
    endpoint = env.raw("PADDLE_GLOO_HTTP_ENDPOINT")
    if endpoint is None and env.has("PADDLE_GLOO_HTTP_HOST") and env.has("PADDLE_GLOO_HTTP_PORT"):
        endpoint = join_endpoint(env.str("PADDLE_GLOO_HTTP_HOST").strip(), env.int("PADDLE_GLOO_HTTP_PORT"))
    if endpoint is None:
        raise ConfigError("PADDLE_GLOO_HTTP_ENDPOINT is not set; PADDLE_WITH_GLOO needs it as the rendezvous.")
    split_endpoint(endpoint, "PADDLE_GLOO_HTTP_ENDPOINT")
    return with_gloo, endpoint.strip(), None


def _beside_worker_0(endpoint: str, servers: tuple[str, ...], workers: tuple[str, ...]) -> str:
    """Returns the rendezvous address. Worker 0 serves the store, so the host is worker 0's where that is known.

    The Kubernetes operators name the host of server 0, which is another pod. paddle-operator 0.3.5 also names the
    server's own port (its correction looks for a port that the job does not use); the intended port is 18 higher.
    """
    host, port = split_endpoint(endpoint, "PADDLE_GLOO_HTTP_ENDPOINT")
    if endpoint in servers:
        port += _GLOO_OFFSET
    if workers:
        host = split_endpoint(workers[0], _ENDPOINTS)[0]
    return join_endpoint(host, port)
