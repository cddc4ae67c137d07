"""Jobs of one launcher on one machine or on nodes that are network namespaces, and what their workers reported."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.helpers.etcd import Etcd  # noqa: E402
from tests.helpers.namespaces import Network  # noqa: E402

HERE = Path(__file__).resolve().parent
WORKER = str(HERE / "_reliability_worker.py")
FLEET, FLEET_OWN, TORCHRUN, TORCHRUN_OPT = "fleet", "fleet, own store", "torchrun", "torchrun, own store"
LAUNCHERS = (FLEET, FLEET_OWN, TORCHRUN, TORCHRUN_OPT)
FLEETS = (FLEET, FLEET_OWN)  # the nodes meet on etcd, and at the launcher of node 1
# torchrun's default store hands old addresses to restarted workers; this opt-out lets it recover.
OPT_OUT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
LEASE_S, WINDOW_S = 3, 5
SECRET = "planted-7d1f0c9b2a"
LIMIT_S = 30.0


class Took(NamedTuple):
    """Seconds in all, and the launcher's part of them: until the last worker's first line."""

    all_s: float
    launcher_s: float | None = None


class Job:
    """The launchers of one job, one a node, and the events of their workers.

    Args:
        launcher: one of ``LAUNCHERS``.
        folder: where everything of the job lies.
        network: the nodes; None for this machine alone.
        workers: processes on each node.
        code: what rank 1 fails with at step 5; -1: it does not.
    """

    def __init__(
        self, launcher: str, folder: Path, network: Network | None = None, *, workers: int = 1, code: int = -1
    ) -> None:
        self.launcher, self.folder, self.network = launcher, folder, network
        self._workers, self._code = workers, code
        self.events_path = folder / "events"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir(parents=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.nodes.values():
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in {event["pid"] for event in self.events()}:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def start(self, place: int = 0, name: str = "", nodes: str = "1", flags: Sequence[str] = ()) -> str:
        """Starts a launcher on node ``place`` (0: this machine) that takes part in a job of ``nodes``."""
        name = name or f"node{place}"
        words = self._fleet(nodes, name) if self.launcher in FLEETS else self._torchrun(nodes, place, name)
        inside = self.network.inside(place) if self.network is not None and place else []
        env = {
            **os.environ,
            "EVENTS": str(self.events_path),
            "NODE": name,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0" if place else "lo",
            "PADDLE_ELASTIC_TTL": f"{LEASE_S}",
            "PYTHONPATH": str(HERE.parent),
            "MY_API_TOKEN": SECRET,
            "FLEET_JOB_SECRET": "5e" * 32,
            **(OPT_OUT if self.launcher == TORCHRUN_OPT else {}),
        }
        with (self.folder / f"{name}.out").open("wb") as out:
            self.nodes[name] = subprocess.Popen(
                [*inside, sys.executable, *words, *flags, WORKER, f"{self._code}"],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return name

    def _fleet(self, nodes: str, name: str) -> list[str]:
        words = ["-m", "fleet.launch", f"--nproc_per_node={self._workers}", f"--log_dir={name}-log"]
        if self.network is None:
            return [*words, *([] if self._code >= 0 else ["--max_restart=100"])]
        job = ["--job_id", self.folder.name]
        elastic = ["--elastic_level=1", f"--elastic_timeout={WINDOW_S}", "--max_restart=100"]
        if self.launcher == FLEET_OWN:
            low, _, high = nodes.partition(":")
            span = f"{low}:{high or int(low) + 1}"  # a fixed number of nodes would end with a lost one
            return [*words, f"--nnodes={span}", f"--master={self.network.address(1)}:29400", *elastic, *job]
        server = f"{self.network.address(0)}:2379"
        if ":" not in nodes:
            return [*words, f"--elastic_server={server}", f"--np={nodes}", "--max_restart=100", *job]
        return [*words, f"--nnodes={nodes}", f"--master=etcd://{server}", *elastic, *job]

    def _torchrun(self, nodes: str, place: int, name: str) -> list[str]:
        restarts = 0 if self._code >= 0 else 100
        words = ["-m", "torch.distributed.run", f"--nproc-per-node={self._workers}", f"--max-restarts={restarts}"]
        words += [f"--log-dir={name}-log", "--redirects=3"]
        if self.network is None:
            return [*words, "--standalone"]
        conf = f"is_host={int(place == 1)},last_call_timeout={WINDOW_S}"
        here = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self.network.address(1)}:29400", f"--rdzv-conf={conf}"]
        return [*words, f"--nnodes={nodes}", *here, "--rdzv-id=J", f"--local-addr={self.network.address(place)}"]

    # -- what happened ------------------------------------------------------------------------------------------

    def events(self) -> list[dict[str, Any]]:
        """Returns what the workers reported so far, in order."""
        if not self.events_path.exists():
            return []
        return [json.loads(line) for line in self.events_path.read_text().splitlines() if line.endswith("}")]

    def started_since(self, since: float) -> list[dict[str, Any]]:
        """Returns the starts of workers after ``since``."""
        return [event for event in self.events() if event["what"] == "start" and event["t"] > since]

    def training_since(self, since: float, world: int) -> float | None:
        """Returns when every rank of a world of ``world`` that started after ``since`` had done a step, or None."""
        events = self.events()
        pids = {event["pid"] for event in events if event["what"] == "start" and event["t"] > since}
        first: dict[int, float] = {}
        for event in events:
            if event["what"] == "step" and event["pid"] in pids and event["world"] == world:
                first.setdefault(event["rank"], event["t"])
        return max(first.values()) if len(first) == world else None

    def wait_training(self, since: float, world: int, limit_s: float = LIMIT_S) -> Took | None:
        """Returns seconds from ``since`` until all train; None when all launchers have ended, or at the limit."""

        def ended() -> bool:
            return all(process.poll() is not None for process in self.nodes.values())

        found = wait_for(lambda: self.training_since(since, world), limit_s, ended)
        if found is None:
            return None
        started = [event["t"] for event in self.started_since(since) if event["world"] == world and event["t"] < found]
        return Took(found - since, max(started[-world:]) - since)

    def newest_pids(self) -> dict[int, int]:
        """Returns rank -> process id of the newest start of each rank."""
        return {event["rank"]: event["pid"] for event in self.events() if event["what"] == "start"}

    def pids_of(self, name: str) -> list[int]:
        """Returns the workers that node ``name`` started."""
        return [event["pid"] for event in self.events() if event["what"] == "start" and event["node"] == name]

    def kill_node(self, name: str) -> None:
        """Ends everything of a node at once, as a loss of power would."""
        os.kill(self.nodes[name].pid, signal.SIGKILL)
        for pid in self.pids_of(name):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def has_secret(self) -> list[str]:
        """Returns the files of the job that hold the planted secret."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return [path.name for path in files if SECRET.encode() in path.read_bytes()]


def wait_for(
    ask: Callable[[], float | None], limit_s: float = LIMIT_S, is_vain: Callable[[], bool] = lambda: False
) -> float | None:
    """Returns the first answer that is not None; None at the limit, or when ``is_vain`` says that none can come."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        vain = is_vain()  # before the question: what came last still counts
        if (answer := ask()) is not None or vain:
            return answer
        time.sleep(0.02)
    return None


def is_running(pid: int) -> bool:
    """Returns whether ``pid`` runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def all_gone(pids: Sequence[int], limit_s: float) -> Took | None:
    """Returns how long it took until none of ``pids`` ran; None when some still did at the limit."""
    began = time.monotonic()
    if wait_for(lambda: None if any(map(is_running, pids)) else 0.0, limit_s) is None:
        return None
    return Took(time.monotonic() - began)


__all__ = [
    "FLEET",
    "FLEETS",
    "FLEET_OWN",
    "LAUNCHERS",
    "Etcd",
    "Job",
    "Network",
    "Took",
    "all_gone",
    "is_running",
    "wait_for",
]
