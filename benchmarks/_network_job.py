"""Jobs whose servers and workers are on nodes apart: network namespaces on a bridge, shaped by ``tc``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _ps_job import HERE, written  # noqa: E402

from tests.helpers.namespaces import Network  # noqa: E402

PORT, LIMIT_S, SECRET = 36001, 300.0, "5e" * 32
RATE, DELAY = "1gbit", "0.2ms"
DELAY_S = 0.0002


def has_netem() -> bool:
    """Returns whether this kernel can delay packets."""
    with Network(1) as network:
        done = subprocess.run([*network.inside(1), *_netem("eth0")], capture_output=True, check=False)
    return done.returncode == 0


def _netem(device: str) -> list[str]:
    return ["tc", "qdisc", "add", "dev", device, "root", "netem", "delay", DELAY, "rate", RATE]


def _tbf(device: str) -> list[str]:
    return ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", RATE, "burst", "128kb", "latency", "20ms"]


@contextmanager
def shaped(count: int, delayed: bool) -> Iterator[Network]:
    """Nodes whose cables have the rate both ways; ``delayed`` says that netem also delays what a node sends."""
    with Network(count) as network:
        for node in range(1, count + 1):
            sending = _netem("eth0") if delayed else _tbf("eth0")
            subprocess.run([*network.inside(node), *sending], check=True)
            subprocess.run([*network.inside(0), *_tbf(f"v{node}")], check=True)
        yield network


@dataclass(frozen=True)
class Layout:
    """Where the processes of a job are: the node of each server and each worker; node 0 is this machine alone."""

    what: str
    servers: tuple[int, ...]
    workers: tuple[int, ...]

    @property
    def nodes(self) -> int:
        """The number of namespaces."""
        return max(*self.servers, *self.workers)

    def addresses(self) -> list[str]:
        """Returns the endpoint of each server."""
        hosts = [Network.address(node) if node else "127.0.0.1" for node in self.servers]
        return [f"{host}:{PORT + i}" for i, host in enumerate(hosts)]


class Processes:
    """The processes of a job started by hand; none is left behind."""

    def __init__(self, script: str, settings: Mapping[str, Any], folder: str, network: Network | None) -> None:
        self._command = [sys.executable, str(HERE / script), json.dumps({**settings, "folder": folder})]
        self._folder, self._network = Path(folder), network
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, node: int, variables: Mapping[str, str]) -> None:
        """Starts a process on a node."""
        inside = self._network.inside(node) if self._network is not None else []
        common = {"OMP_NUM_THREADS": "1", "FLEET_JOB_SECRET": SECRET, "PYTHONPATH": str(HERE.parent)}
        if self._network is not None:  # namespaces have one memory, and nodes have not
            common["FLEET_PS_SHARED_MEMORY"] = "0"
        with (self._folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [*inside, *self._command], env={**os.environ, **common, **variables}, stdout=log, stderr=log
            )

    def wait(self) -> None:
        """Returns when all have ended."""
        self.wait_until(lambda: all(process.poll() == 0 for process in self.running.values()))

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Returns when ``done()``; ends the benchmark, with the logs, where a process has failed or it takes long."""
        deadline = time.monotonic() + LIMIT_S
        while not done():
            codes = {name: process.poll() for name, process in self.running.items()}
            if any(codes.values()) or time.monotonic() > deadline:
                logs = [f"{name}: {(self._folder / f'{name}.log').read_text()[-1500:]}" for name in codes]
                raise SystemExit("\n".join([f"the processes ended with {codes}", *logs]))
            time.sleep(0.1)

    def kill(self) -> None:
        """Ends what still runs."""
        for process in self.running.values():
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()


@contextmanager
def started(
    script: str,
    settings: Mapping[str, Any],
    layout: Layout,
    network: Network | None,
    shards: Sequence[Sequence[str]] = (),
) -> Iterator[tuple[Processes, str]]:
    """Starts all processes of a job; gives them, and the folder in which they write.

    ``shards`` has for each server the endpoints of shards that can move; two servers serve them at first.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = Processes(script, settings, folder, network)
        stack.callback(processes.kill)
        addresses = [endpoints[0] for endpoints in shards] or layout.addresses()
        shared = {"PADDLE_PSERVERS_IP_PORT_LIST": ",".join(addresses), "PADDLE_TRAINERS_NUM": f"{len(layout.workers)}"}
        if shards:
            first = [shards[shard % 2][shard] for shard in range(len(shards[0]))]
            movable = {
                "FLEET_PS_SHARD_ENDPOINTS": ";".join(map(",".join, shards)),
                "FLEET_PS_FOLDER": f"{folder}/state",
            }
            shared.update({**movable, "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(first)})
        for i, (node, address) in enumerate(zip(layout.servers, addresses, strict=True)):
            host, _, port = address.partition(":")
            role = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
            processes.start(f"server-{i}", node, {**shared, **role})
        for rank, node in enumerate(layout.workers):
            role = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": f"{rank}"}
            processes.start(f"worker-{rank}", node, {**shared, **role})
        yield processes, folder


def job_on(layout: Layout, settings: Mapping[str, Any], network: Network | None) -> list[dict[str, Any]]:
    """Runs a job of :mod:`_tables_fleet` where ``layout`` says; returns what its two workers wrote."""
    with started("_tables_fleet.py", settings, layout, network) as (processes, folder):
        processes.wait()
        return written(folder)


def run_inside(network: Network, node: int, words: Sequence[str]) -> str:
    """Returns what a command of Python on a node prints; its errors too."""
    environment = {**os.environ, "FLEET_JOB_SECRET": SECRET, "PYTHONPATH": str(HERE.parent)}
    command = [*network.inside(node), sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.stdout + done.stderr
