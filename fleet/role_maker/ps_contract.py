"""Fleet's contract for a parameter-server job: PADDLE_PSERVERS_IP_PORT_LIST, TRAINING_ROLE, PADDLE_TRAINERS_NUM ...

Standard library only.
"""

from __future__ import annotations

from fleet.common.addresses import join_endpoint, split_endpoint
from fleet.env import Environment
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.role_maker.fleet_contract import read_device_ids, read_list
from fleet.role_maker.record import Role, RoleRecord, check_endpoints, check_rank, place_by_endpoints, read_hosts

_STANDBYS = "FLEET_PS_STANDBY_ENDPOINTS"
_SHARDS = "FLEET_PS_SHARD_ENDPOINTS"
_SERVERS = "PADDLE_PSERVERS_IP_PORT_LIST"
_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
_GLOO_OFFSET = 18
_ROLE_NAMES = ("TRAINING_ROLE", "PADDLE_TRAINING_ROLE", "PADDLE_ROLE")
_ROLES = {
    "TRAINER": Role.WORKER,
    "PSERVER": Role.SERVER,
    "HETER_TRAINER": Role.HETER_WORKER,
    "HETER": Role.HETER_WORKER,  # the Kubernetes operator's spelling
    "COORDINATOR": Role.COORDINATOR,
}


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
