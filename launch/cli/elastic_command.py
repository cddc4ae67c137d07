"""``python -m fleet.elastic``: scales a running elastic job, shows a job, removes the records of a dead one.

Only this module and the launchers write a job's keys, on etcd or at the launcher where the nodes meet; each change is a
compare-and-set on its one record.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fleet.common.addresses import split_endpoint, split_master
from fleet.common.command_text import plain_text
from fleet.env import Environment
from fleet.errors import ConfigError, LaunchError
from fleet.launch.cli.config import check_name
from fleet.launch.membership import world as _world
from fleet.launch.membership.agreement import wanted_text
from fleet.launch.membership.etcd_address import check_etcd_client, read_etcd_address
from fleet.launch.membership.kv_client import KeyValueClient
from fleet.launch.membership.record_proof import RecordProofs
from fleet.launch.membership.store import View
from fleet.launch.membership.world import job_prefix
from fleet.launch.plan.process_plan import JOB_SECRET
from fleet.launch.processes.redact import one_sentence

if TYPE_CHECKING:
    from fleet.launch.membership.etcd import EtcdStore

_TIMEOUT_S = 3.0
_PROGRAM = "python -m fleet.elastic"


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Carries out one action on the job that flags or variables name.

    Args:
        argv: the arguments without the program's name; None takes those of this process.
        environ: the environment; None takes that of this process.

    Returns:
        0 when it is done; 1 when the job, or its store, does not allow it; 2 for a command line that cannot be used.
    """
    environment = Environment(environ)
    try:
        arguments = _parser(environment).parse_args(None if argv is None else list(argv))
        code = _run(arguments, environment)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader, such as head, has read enough.
        # Python flushes standard output once more at its end, and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as stop:
        # argparse has printed the usage or the help.
        return stop.code if isinstance(stop.code, int) else 0
    except ConfigError as error:
        return _report(error, 2)
    except LaunchError as error:
        return _report(error, 1)


def _report(error: Exception, code: int) -> int:
    print(f"{_PROGRAM}: error: {one_sentence(error)}", file=sys.stderr)
    return code


def _parser(environment: Environment) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description=plain_text((__doc__ or "").partition("\n\n")[0]), allow_abbrev=False
    )
    parser.add_argument("action", choices=("scale", "status", "clean"), help="what to do with the job")
    parser.add_argument(
        "--elastic_server",
        default=environment.raw("PADDLE_ELASTIC_SERVER"),
        help="etcd host:port; default PADDLE_ELASTIC_SERVER",
    )
    parser.add_argument("--master", help="the job's --master: ip:port, or etcd://ip:port, instead of --elastic_server")
    parser.add_argument(
        "--job_id",
        default=environment.first("PADDLE_ELASTIC_JOB_ID", "PADDLE_JOB_ID"),
        help="name of the job; default PADDLE_ELASTIC_JOB_ID, and 'default' with --master ip:port",
    )
    parser.add_argument(
        "--np",
        default=environment.raw("PADDLE_ELASTIC_NP"),
        help="number of nodes, N or MIN:MAX, for scale; default PADDLE_ELASTIC_NP",
    )
    parser.add_argument("--json", action="store_true", help="status as JSON")
    return parser


def _run(arguments: argparse.Namespace, environment: Environment) -> int:
    scheme, master = split_master(arguments.master, "--master") if arguments.master else ("etcd", "")
    if scheme == "etcd" and not (master or arguments.elastic_server):
        raise ConfigError(
            "The address of etcd is missing. Give --elastic_server=ip:port, or set PADDLE_ELASTIC_SERVER; or give "
            "--master=ip:port as the job's launchers have it."
        )
    job_id = arguments.job_id or ("" if scheme == "etcd" else "default")
    if not job_id:
        raise ConfigError("The name of the job is missing. Give --job_id=NAME, or set PADDLE_ELASTIC_JOB_ID.")
    check_name(job_id, "--job_id")
    if arguments.action == "scale":
        if not arguments.np:
            raise ConfigError("scale needs the number of nodes: --np=N or --np=MIN:MAX.")
        read_np(arguments.np)
    text = environment.raw(JOB_SECRET)
    secret = None if text is None else text.strip().encode()
    server = master if scheme != "etcd" else ""
    store = _service(server, secret or b"") if server else _etcd(master or arguments.elastic_server, environment)
    try:
        job = ElasticJob(store, job_id, secret)
        if arguments.action == "scale":
            print(job.scale(*read_np(arguments.np)))
        elif arguments.action == "clean":
            print(job.clean())
        else:
            print(job.status_json() if arguments.json else job.status())
    finally:
        store.close()
    return 0


def _etcd(server: str, environment: Environment) -> EtcdStore:
    check_etcd_client()
    from fleet.launch.membership.etcd import EtcdStore

    return EtcdStore(read_etcd_address(server, environment, "--elastic_server"), timeout_s=_TIMEOUT_S)


def _service(master: str, secret: bytes) -> KeyValueClient:
    """Returns a client of the launcher where the job's nodes meet."""
    client = KeyValueClient(split_endpoint(master, "--master"), secret, ttl_s=_TIMEOUT_S)
    try:
        client.connect()
    except OSError as error:
        raise LaunchError(
            f"No launcher answers at {master} ({error}). A job that meets there exists while the launcher of that node "
            "lives, and nothing is left of it afterwards."
        ) from error
    return client


def _printable(text: str) -> str:
    """Returns ``text`` for a terminal: records that anybody may write to etcd move no cursor and begin no line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _state_word(world: _world.World) -> str:
    """Returns the state of the job; "over" is a job that will not start again, not one whose nodes still come."""
    starts_again = world.state == _world.OVER and (world.reason is None or world.reason.restart)
    return "waiting for nodes" if starts_again else world.state


def read_np(text: str) -> tuple[int, int]:
    """Returns MIN and MAX of ``N`` or ``MIN:MAX``; raises ConfigError for anything else.

    Example:
        >>> read_np("2:4")
        (2, 4)
    """
    parts = text.split(":")
    numbers = [int(part) for part in parts if part.strip().isdecimal() and len(part) < 10]
    if len(numbers) != len(parts) or len(parts) > 2 or numbers[0] < 1 or numbers[-1] < numbers[0]:
        raise ConfigError(f"--np is {text!r}; it takes N or MIN:MAX, integers from 1 with MIN <= MAX.")
    return numbers[0], numbers[-1]


class ElasticJob:
    """One job as its store shows it.

    Args:
        store: an open connection to etcd, or to the launcher where the nodes of the job meet.
        job_id: the job's name.
        secret: its secret, under which records are checked; None: they are taken as they are.
    """

    def __init__(self, store: EtcdStore | KeyValueClient, job_id: str, secret: bytes | None = None) -> None:
        self._store = store
        self._job_id = job_id
        self._prefix = job_prefix(job_id)
        self._proofs = RecordProofs(secret, self._prefix)
        self._stranger = "no record of a launcher" if secret is None else "without a proof of FLEET_JOB_SECRET"

    def _read(self) -> View:
        """Returns the job's records; ``unproved`` has the others."""
        return self._proofs.checked(self._store.read(self._prefix))

    def scale(self, low: int, high: int) -> str:
        """Sets how many nodes the job wants; the same number restarts nothing.

        Raises LaunchError for a job that does not exist, is complete, has failed, or has a fixed number of nodes.
        """
        while True:
            view = self._read()
            world = self._world(view)
            ended = world.state == _world.COMPLETE or (world.reason is not None and not world.reason.restart)
            if ended:
                raise LaunchError(f"The job {self._job_id!r} is over ({world.state}), so it cannot be scaled.")
            before = wanted_text(world)
            if any(not node.is_elastic for node in _world.read_nodes(view).values()):
                raise LaunchError(
                    f"The job {self._job_id!r} has a fixed number of nodes, {before}, so it cannot be scaled. Start it "
                    "with a range: --nnodes=MIN:MAX."
                )
            if (low, high) == (world.min_nodes, world.max_nodes):
                return f"The job {self._job_id!r} has --np={before} already; nothing restarts. action scale done"
            changed = replace(world, min_nodes=low, max_nodes=high)
            if self._store.swap(self._prefix + _world.WORLD_KEY, view.texts[_world.WORLD_KEY], _world.to_text(changed)):
                return f"The job {self._job_id!r} has --np={wanted_text(changed)} (was {before}). action scale done"

    def clean(self) -> str:
        """Removes every key of the job; raises LaunchError while launchers of it are alive."""
        if isinstance(self._store, KeyValueClient):
            raise LaunchError(
                f"The records of the job {self._job_id!r} are in the memory of the launcher where its nodes meet and "
                "go with it, so there is nothing to clean. Stop that launcher (SIGTERM) to end the job."
            )
        view = self._read()
        alive = sorted(_printable(node.host) for node in _world.read_nodes(view).values())
        if alive:
            raise LaunchError(
                f"The job {self._job_id!r} still has launchers on {', '.join(alive)}. Stop them first (SIGTERM); a "
                "launcher that was killed is forgotten when its lease ends."
            )
        return f"{self._store.delete(self._prefix)} key(s) of the job {self._job_id!r} removed. action clean done"

    def status(self) -> str:
        """Returns the state of the job and its nodes, one line each."""
        view = self._read()
        world, nodes = self._world(view), _world.read_nodes(view)
        lines = [
            f"job {self._job_id}: {_state_word(world)}, generation {world.generation}, "
            f"wants {wanted_text(world)} nodes, {world.restarts} restarts"
        ]
        if world.reason is not None:
            lines.append(f"last end: {world.reason.kind}: {world.reason.text}")
        for name, node in sorted(nodes.items(), key=lambda item: self._rank(world, item[0])):
            rank = self._rank(world, name)
            place = f"rank {rank}" if rank < len(world.nodes) else "no rank"
            lines.append(f"node {node.host}: {place}, {node.phase}, pod {node.peer.get('name', '?')}")
        lines += (f"ignored: {key} of {host} is {self._stranger}" for key, host in sorted(view.unproved.items()))
        return "\n".join(map(_printable, lines))

    def status_json(self) -> str:
        """Returns the same as one JSON object."""
        view = self._read()
        world, nodes = self._world(view), _world.read_nodes(view)
        data = {"world": _world.to_json(world), "nodes": {name: _world.to_json(node) for name, node in nodes.items()}}
        return json.dumps(data, sort_keys=True)

    @staticmethod
    def _rank(world: _world.World, name: str) -> int:
        running = world.state in (_world.FIXED, _world.COMPLETE)
        return world.nodes.index(name) if running and name in world.nodes else len(world.nodes)

    def _world(self, view: View) -> _world.World:
        world = _world.read_world(view)
        if world is None and _world.WORLD_KEY in view.texts:
            raise LaunchError(
                f"The record of the job {self._job_id!r} is {self._stranger}. Set FLEET_JOB_SECRET as its launchers "
                "have it, or leave it unset here. If it is damaged, stop the launchers; clean removes it."
            )
        is_etcd = not isinstance(self._store, KeyValueClient)
        where = "on this etcd. Check --job_id and --elastic_server" if is_etcd else "there. Check --job_id and --master"
        if world is None:
            raise LaunchError(f"No job {self._job_id!r} is {where}; a job exists once its first launcher has started.")
        return world
