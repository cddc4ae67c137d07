"""Jobs on a Ray cluster: a placement group with one launcher in each bundle, started, followed and stopped.

Example:
    >>> from fleet.integrations import ray
    >>> ray.launch("train.py", nodes=2, nproc_per_node=4, resources_per_node={"CPU": 8, "GPU": 4})
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.common.extras import install_line
from fleet.env import Environment
from fleet.errors import ConfigError, LaunchError, UnsupportedOptionError
from fleet.integrations._ray_request import RayRequest, read_request

if TYPE_CHECKING:
    import os

__all__ = ["launch"]

_ANSWER_S = 10.0


def launch(
    script: str | os.PathLike[str],
    *,
    args: Sequence[str] = (),
    nodes: int = 1,
    nproc_per_node: int | None = None,
    resources_per_node: Mapping[str, float] | None = None,
    placement_strategy: str = "SPREAD",
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    working_dir: str | None = None,
    address: str | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Runs a job on a Ray cluster and returns when it has ended with 0.

    Each node of the job is a bundle of a placement group, with one launcher. They meet at the first one's address and
    start the workers. This process prints the output of the first launcher and of worker 0. However the call ends, the
    processes of the job have ended and the placement group is free again.

    Args:
        script: the training script; a relative path counts from ``working_dir``, or from the current folder, which the
            nodes must have as well.
        args: the arguments of the script.
        nodes: number of launchers.
        nproc_per_node: workers that each launcher starts; None for one on each GPU of the bundle, or one.
        resources_per_node: Ray's reservation for each launcher; None for one CPU for each worker. Workers see the
            GPUs of their bundle and no others.
        placement_strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD (each bundle on another machine).
        flags: further flags of the launcher, as in ``["--max_restart=3"]``.
        env: variables of the workers, added to the environment of the nodes.
        working_dir: folder that Ray copies to every node, or its URI. Only where this call connects to Ray; a program
            that has connected gives it to ``ray.init(runtime_env={"working_dir": ...})``.
        address: the cluster; None for the connected cluster, or else the cluster that ``ray.init()`` finds or starts.
        timeout_s: seconds to wait for the resources; until then a line every few seconds names the missing ones.

    Raises:
        ConfigError: a value is wrong, or this call sets the flag itself.
        UnsupportedOptionError: Ray is not installed.
        WorkerFailedError: a worker failed; the message holds the launcher's report, ``exit_code`` is the worker's.
        LaunchError: the resources did not come, a launcher ended otherwise, or a node is lost.

    Example:
        >>> launch("train.py", args=["--epochs=3"], nodes=2, nproc_per_node=2, resources_per_node={"CPU": 2})
    """
    request = read_request(
        script=script, args=args, nodes=nodes, nproc_per_node=nproc_per_node, resources_per_node=resources_per_node,
        placement_strategy=placement_strategy, flags=flags, env=env, working_dir=working_dir, address=address,
        timeout_s=timeout_s)  # fmt: skip
    if find_spec("ray") is None:
        raise UnsupportedOptionError(f"fleet.integrations.ray needs the extra ray; {install_line('ray')}.")
    with _connected(request) as folder:
        _run(request, folder)


def _run(request: RayRequest, folder: str) -> None:
    from fleet.integrations._ray_job import RayJob

    secret = request.env.get("FLEET_JOB_SECRET") or Environment().raw("FLEET_JOB_SECRET")
    RayJob(request, folder, secret or secrets.token_hex(32)).run()


@contextmanager
def _connected(request: RayRequest) -> Iterator[str]:
    """Connects to Ray unless the program has; yields the folder of the job, empty where Ray unpacks the folder."""
    import ray

    if ray.is_initialized():
        for name in ("address", "working_dir"):
            if getattr(request, name) is not None:
                instead = "Omit it" if name == "address" else "Give it to ray.init(runtime_env={'working_dir': ...})"
                raise ConfigError(
                    f"{name}={getattr(request, name)!r}: this program is connected to Ray already, with settings of "
                    f"its own. {instead}, or call ray.shutdown() first."
                )
        # A connection of the program stays open: others may use it.
        yield _folder()
        return
    if request.address is not None:
        _check_answers(request.address)
    copied = {} if request.working_dir is None else {"working_dir": request.working_dir}
    ray.init(address=request.address, runtime_env=copied, log_to_driver=False)
    try:
        yield _folder()
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raises LaunchError when nothing listens at ``address``; Ray would try for minutes."""
    match = re.fullmatch(r"(?:ray://)?\[?([^\[\]]+)\]?:(\d{1,5})", address)
    if match is None:  # auto, local, or another form of Ray's
        return
    try:
        socket.create_connection((match[1], int(match[2])), _ANSWER_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise LaunchError(
            f"address={address!r}: nothing answers there ({error}). It takes the address of the head node, as in "
            "10.0.0.1:6379, or auto for the cluster that this machine belongs to; `ray status` shows it."
        ) from None


def _folder() -> str:
    import ray

    unpacked = ray.get_runtime_context().runtime_env.get("working_dir")
    return "" if unpacked else str(Path.cwd())
