"""spawn: the workers of a job as new processes of this one."""

from __future__ import annotations

import atexit
import functools
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from fleet.common.exit_status import EXIT
from fleet.env import Environment, export
from fleet.errors import ConfigError, UnknownOptionError, UnsupportedOptionError, did_you_mean
from fleet.launch.plan.ports import free_ports

_SPAWN_OPTIONS = ("start_method", "gpus", "ips", "backend")


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> Any:
    """Runs ``func(*args)`` in ``nprocs`` new processes on this machine, each set up as a worker of one job.

    ``func`` calls ``fleet.init(is_collective=True)`` or ``fleet.init_parallel_env()`` itself.

    Args:
        func: a function that the new processes can import.
        args: its arguments.
        nprocs: number of processes; -1 means one for each GPU (in ``gpus``, or visible). A machine without a GPU
            needs a number.
        join: wait for the processes.
        daemon: end the processes when this one ends.
        options: ``start_method`` ("spawn", "forkserver", "fork"), ``gpus`` ("0,1": indices among the visible
            devices), ``backend`` ("auto", "gloo", "nccl"), ``ips`` (this machine only).

    Returns:
        A torch ``ProcessContext`` whose ``join()`` waits; already joined when ``join`` is True.

    Raises:
        ConfigError: an argument or option is wrong. Nothing was started.
        torch.multiprocessing.ProcessRaisedException: a process raised; it carries the traceback.

    Example:
        >>> fleet.spawn(train, args=("data",), nprocs=2)
    """
    start_method, gpus, backend = _checked_options(options)
    count = _checked_count(nprocs, gpus)
    if count > 1 and platform.system() == "Windows":
        raise UnsupportedOptionError(f"spawn(nprocs={count}): distributed training runs on Linux, not on Windows.")
    if not callable(func):
        raise ConfigError(f"spawn(func={func!r}) takes a function.")
    if start_method != "fork":
        _check_importable(func)
    on_gpu = backend != "gloo" and torch.cuda.is_available()
    if backend == "nccl" and not on_gpu:
        raise ConfigError("spawn(backend='nccl') needs a GPU that torch can use, and there is none. Use 'gloo'.")
    if on_gpu and gpus is None:
        gpus = list(range(torch.cuda.device_count()))
        if count > len(gpus):
            raise ConfigError(
                f"spawn(nprocs={nprocs!r}): {len(gpus)} GPU(s) are visible, and each process needs one. "
                "Use fewer processes, or backend='gloo' to run on the CPU."
            )
    environments = _environments(count, gpus if on_gpu else None, "nccl" if on_gpu else "gloo")
    return start_processes(
        _run_worker,
        args=(func, tuple(args), environments, start_method != "spawn"),
        nprocs=count,
        join=join,
        daemon=daemon,
        start_method=start_method,
    )


def _check_importable(func: Callable[..., Any]) -> None:
    """Raises ConfigError for a function that a new process cannot import by name."""
    while isinstance(func, functools.partial):
        func = func.func
    name = getattr(func, "__qualname__", "")
    problem = ""
    if "<lambda>" in name:
        problem = "is a lambda, and new processes import the function by name. Write it as a def in a .py file."
    elif "<locals>" in name:
        problem = "is defined inside another function, and new processes import it by name. Move it to the top level."
    elif getattr(func, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        problem = (
            "is defined in a notebook or at the prompt, where new processes cannot import it. Put it in a .py file."
        )
    if problem:
        raise ConfigError(f"spawn(func={name or func!r}): it {problem}")


def _run_worker(
    index: int, func: Callable[..., Any], args: tuple[Any, ...], environments: list[dict[str, str]], is_fork: bool
) -> None:
    export(environments[index])
    if not Environment().has("OMP_NUM_THREADS"):
        torch.set_num_threads(max((os.cpu_count() or 1) // len(environments), 1))
    if is_fork:
        # A fork inherits the parent's exit functions, which would close the parent's job here.
        atexit._clear()
    try:
        func(*args)
    except BaseException as error:
        EXIT.note(error)
        raise
    finally:
        # A process of multiprocessing's fork ends by os._exit(); the other workers learn of this one's end by an exit
        # function.
        if is_fork:
            atexit._run_exitfuncs()


def _checked_options(options: dict[str, Any]) -> tuple[str, list[int] | None, str]:
    for name in options:
        if name not in _SPAWN_OPTIONS:
            raise UnknownOptionError(
                f"spawn({name}=...) is not an option.{did_you_mean(name, _SPAWN_OPTIONS)} "
                f"It takes {', '.join(_SPAWN_OPTIONS)}."
            )
    start_method = options.get("start_method", "spawn")
    if start_method not in ("spawn", "forkserver", "fork"):
        raise ConfigError(f"spawn(start_method={start_method!r}) takes 'spawn', 'forkserver' or 'fork'.")
    backend = options.get("backend", "auto")
    if backend not in ("auto", "gloo", "nccl"):
        raise ConfigError(f"spawn(backend={backend!r}) takes 'auto', 'gloo' or 'nccl'.")
    ips = options.get("ips")
    if ips not in (None, "", "127.0.0.1", "localhost"):
        raise ConfigError(f"spawn(ips={ips!r}) works on this machine only. Use python -m fleet.launch --ips.")
    gpus = options.get("gpus")
    return start_method, None if gpus is None else _gpu_indices(gpus, backend), backend


def _gpu_indices(gpus: object, backend: str) -> list[int]:
    parts = [part.strip() for part in gpus.split(",")] if isinstance(gpus, str) else gpus
    count = torch.cuda.device_count()
    indices = []
    for part in parts if isinstance(parts, list | tuple) else []:
        if not str(part).isdigit() or int(part) >= count or backend == "gloo":
            raise ConfigError(
                f"spawn(gpus={gpus!r}) takes indices of visible GPUs (there are {count}), and not backend='gloo'."
            )
        indices.append(int(part))
    if not indices or len(set(indices)) != len(indices):
        raise ConfigError(f"spawn(gpus={gpus!r}) takes different indices such as '0,1'.")
    return indices


def _checked_count(nprocs: int, gpus: list[int] | None) -> int:
    if type(nprocs) is not int or (nprocs < 1 and nprocs != -1):
        raise ConfigError(f"spawn(nprocs={nprocs!r}) takes a number of processes, or -1.")
    visible = len(gpus) if gpus is not None else torch.cuda.device_count()
    if nprocs == -1 and visible == 0:
        raise ConfigError("spawn(nprocs=-1) starts one process for each GPU, and there is none. Give a number.")
    count = visible if nprocs == -1 else nprocs
    if gpus is not None and count != len(gpus):
        raise ConfigError(f"spawn(nprocs={nprocs!r}, gpus=...) names {len(gpus)} GPUs; each process needs one.")
    return count


def _environments(count: int, gpus: list[int] | None, backend: str) -> list[dict[str, str]]:
    """Returns Fleet's and torch's variables of each worker, all on loopback."""
    ports = free_ports(count + 1, "127.0.0.1")
    endpoints = [f"127.0.0.1:{port}" for port in ports[1:]]
    environments = []
    for rank in range(count):
        values = {
            "PADDLE_TRAINER_ID": rank,
            "PADDLE_TRAINERS_NUM": count,
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
            "PADDLE_RANK_IN_NODE": rank,
            "PADDLE_LOCAL_RANK": rank,
            "PADDLE_LOCAL_SIZE": count,
            "PADDLE_GLOBAL_RANK": rank,
            "PADDLE_GLOBAL_SIZE": count,
            "PADDLE_NNODES": 1,
            "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
            "PADDLE_DISTRI_BACKEND": backend,
            "RANK": rank,
            "WORLD_SIZE": count,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": ports[0],
            "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 serves the store, whatever started this process
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        if gpus is not None:
            values["FLAGS_selected_gpus"] = gpus[rank]
        if backend == "gloo" and os.path.isdir("/sys/class/net/lo"):
            values["GLOO_SOCKET_IFNAME"] = "lo"  # all workers run here; nothing needs to be reachable from outside
        environments.append({name: str(value) for name, value in values.items()})
    return environments
