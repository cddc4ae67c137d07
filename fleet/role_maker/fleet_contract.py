"""Fleet's contract for a collective worker: PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM, PADDLE_TRAINER_ENDPOINTS ...

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
from fleet.errors import ConfigError
from fleet.role_maker.record import RoleRecord, check_endpoints, check_rank, place_by_endpoints, place_by_numbers

_RANK = ("PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK")
_WORLD = ("PADDLE_TRAINERS_NUM", "PADDLE_GLOBAL_SIZE")
_LOCAL_RANK = ("PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "LOCAL_RANK")
_LOCAL_SIZE = ("PADDLE_LOCAL_SIZE", "LOCAL_WORLD_SIZE")
_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"
_MAX_SAVED = 1 << 26


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
