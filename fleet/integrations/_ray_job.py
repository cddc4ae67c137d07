"""RayJob: one job on a Ray cluster, from its placement group to its end, with a LauncherActor on each node.

[Note: Who ends what]
The actors hold the launchers, and the launchers the workers: an actor that dies takes its launcher with it, by a pipe
that the kernel closes, and the launcher's guardian the workers. Actors die with the process that has called ``launch``,
and with the machine that they run on. So nothing here needs to be alive for the processes of a job to end; ``_stop``
only ends them in order, so that workers can save themselves and say why.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fleet.common.log import LOGGER
from fleet.env import Environment
from fleet.errors import LaunchError, WorkerFailedError
from fleet.integrations._ray_request import SET_VARIABLES, RayRequest
from fleet.launch.plan.ports import free_ports

_SAID_EACH_S = 3.0
_FOLLOWED_S = 0.5
_PLACED_S = 0.5  # the least that a placement gets, also with timeout_s=0
_OTHERS_END_S = 30.0  # after the first launcher that failed; the others are told over the meeting
_ANSWER_S = 10.0
_OWN_RESOURCES = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
_KEPT_CHARACTERS = 20_000
_LINES = 40
_ELSEWHERE = "Another node ended the job"
_REPORT = " Pod failed"
_FIRST = re.compile(r"Worker (\d+) of \d+ \(host (\S+), pid \d+\) was the first to fail.* are in (.+)\.$", re.MULTILINE)
_BLOCK = 1 << 16
_KEPT = ("FLEET_POD",)  # a cluster that a job's worker has started ends with that job


class RayJob:
    """Runs one job.

    Args:
        request: the checked arguments.
        folder: the folder that the launchers run in; empty for the folder that Ray unpacks.
        secret: proves that a process belongs to the job. It reaches the nodes as an argument of a method, not in a
            runtime environment, which Ray shows.
    """

    def __init__(self, request: RayRequest, folder: str, secret: str) -> None:
        self._request = request
        self._folder = folder
        self._secret = secret
        self._actors: list[Any] = []
        self._ends = [LauncherEnd(rank) for rank in range(request.nodes)]

    def run(self) -> None:
        """Returns when the job has ended with 0; raises LaunchError when it ended otherwise."""
        with self._placed() as group:
            try:
                self._start(group)
                self._follow()
            finally:
                self._stop()
        if error := job_error(self._ends):
            raise error

    @contextlib.contextmanager
    def _placed(self) -> Iterator[PlacementGroup]:
        request = self._request
        group = placement_group([dict(request.resources)] * request.nodes, strategy=request.placement_strategy)
        try:
            self._wait_for(group)
            yield group
        finally:
            remove_placement_group(group)

    def _wait_for(self, group: PlacementGroup) -> None:
        """Returns when the group has its resources; raises LaunchError after ``timeout_s``."""
        began = said = time.monotonic()
        while not group.wait(timeout_seconds=_PLACED_S):
            now = time.monotonic()
            if now - began >= self._request.timeout_s:
                raise LaunchError(
                    f"{self._missing()}. They did not come within timeout_s={self._request.timeout_s:g}. Ask for less "
                    "with nodes, resources_per_node or another placement_strategy, or add nodes to the cluster."
                )
            if now - said >= _SAID_EACH_S:
                said = now
                LOGGER.warning(f"{self._missing()}. Waiting for {now - began:.0f} s of {self._request.timeout_s:g} s.")

    def _missing(self) -> str:
        request = self._request
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fit = sum(all(node.get(name, 0) >= value for name, value in request.resources.items()) for node in alive)
        whole = ray.cluster_resources()
        free = ray.available_resources()
        has = ", ".join(f"{name} {whole.get(name, 0):g} (free {free.get(name, 0):g})" for name in request.resources)
        asked = ", ".join(f"{name} {value:g}" for name, value in request.resources.items())
        return (
            f"The job asks for {request.nodes} x ({asked}), {request.placement_strategy}; the cluster has {has} on "
            f"{len(alive)} node(s), of which {fit} could hold such a part when free"
        )

    def _start(self, group: PlacementGroup) -> None:
        request = self._request
        options = {_OWN_RESOURCES[name]: value for name, value in request.resources.items() if name in _OWN_RESOURCES}
        others = {name: value for name, value in request.resources.items() if name not in _OWN_RESOURCES}
        remote = ray.remote(LauncherActor)
        for index in range(request.nodes):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actor = remote.options(
                num_cpus=options.get("num_cpus", 0),
                num_gpus=options.get("num_gpus", 0),
                memory=options.get("memory"),
                resources=others,
                max_restarts=0,
                scheduling_strategy=where,
            ).remote()
            self._actors.append(actor)
        places = [self._answer(rank, actor.place.remote()) for rank, actor in enumerate(self._actors)]
        for end, (host, _) in zip(self._ends, places, strict=True):
            end.host = host
        name = f"ray-{secrets.token_hex(4)}"
        master = "{}:{}".format(*places[0])
        # Before the launchers start: a start that is interrupted must be stopped as well.
        for end in self._ends:
            end.is_running = True
        started = [
            actor.start.remote(
                self._flags(rank, name, master),
                self._log_dir(rank, name),
                [request.script, *request.args],
                self._folder,
                self._variables(),
            )
            for rank, actor in enumerate(self._actors)
        ]
        for rank, answer in enumerate(started):
            if problem := self._answer(rank, answer):
                raise LaunchError(f"Node {rank} ({places[rank][0]}): {problem}. {self._where()}")

    def _where(self) -> str:
        return (
            "The nodes need the folder that the job starts in: share it, or let Ray copy it with working_dir (or "
            "ray.init(runtime_env={'working_dir': ...}))."
        )

    def _flags(self, rank: int, name: str, master: str) -> list[str]:
        request = self._request
        flags = [*request.flags, f"--job_id={name}"]
        if request.nproc_per_node is not None:
            flags.append(f"--nproc_per_node={request.nproc_per_node}")
        if request.nodes == 1:
            return [*flags, "--standalone"]
        host = self._ends[rank].host
        return [*flags, f"--nnodes={request.nodes}", f"--rank={rank}", f"--master={master}", f"--host={host}"]

    def _log_dir(self, rank: int, name: str) -> str:
        base = self._request.log_dir or (f"log/{name}" if self._folder else f"fleet-{name}")
        return base if self._request.nodes == 1 else f"{base}/node-{rank}"

    def _variables(self) -> dict[str, str]:
        request = self._request
        workers = request.nproc_per_node or int(request.resources.get("GPU", 1)) or 1
        threads = max(1, int(request.resources.get("CPU", 1)) // workers)
        # Ray sets OMP_NUM_THREADS to the processors of the whole bundle, which its workers share.
        return {"OMP_NUM_THREADS": f"{threads}", **request.env, "FLEET_JOB_SECRET": self._secret}

    def _follow(self) -> None:
        """Prints the output of the first launcher until all launchers have ended, or time is up after a failure."""
        calls = {actor.follow.remote(_FOLLOWED_S): rank for rank, actor in enumerate(self._actors)}
        deadline = None
        while calls:
            done, _ = ray.wait(list(calls), num_returns=1, timeout=1.0)
            for call in done:
                rank = calls.pop(call)
                text, code = self._heard(rank, call)
                self._ends[rank].add(text)
                if rank == 0 and text:
                    print(text, end="", flush=True)
                if code is None:
                    calls[self._actors[rank].follow.remote(_FOLLOWED_S)] = rank
                    continue
                self._ends[rank].code = code
                self._ends[rank].is_running = False
                # The others learn of a failure over the meeting and end by themselves; a launcher that hangs does not.
                if code and deadline is None:
                    deadline = time.monotonic() + _OTHERS_END_S + self._request.ending_s
            if deadline is not None and time.monotonic() > deadline:
                return

    def _heard(self, rank: int, call: Any) -> tuple[str, int | None]:
        """Returns the answer of ``follow``, an empty one while the connection is cut for a moment."""
        try:
            text, code = self._answer(rank, call)
        except LaunchError as error:
            if not isinstance(error.__cause__, ActorUnavailableError):
                raise
            # Ray finds out whether the actor is lost, and says so to a later call.
            self._ends[rank].is_running = True
            time.sleep(_FOLLOWED_S)
            return "", None
        return text, code

    def _answer(self, rank: int, call: Any) -> Any:
        """Returns the answer of an actor; raises LaunchError when it is lost."""
        try:
            return ray.get(call)
        except RayError as error:
            end = self._ends[rank]
            end.is_running = False
            where = f" ({end.host})" if end.host else ""
            what = "of the job is lost" if end.host else "of the job could not start"
            reason = " ".join(f"{error}".split())[:600].rstrip(". ")
            raise LaunchError(
                f"Node {rank}{where} {what}, and the launchers of the other nodes are stopped. Ray says: {reason}. "
                "Start the job again; it resumes from its last fleet.elastic.Checkpoint, if it has one."
            ) from error

    def _stop(self) -> None:
        """Ends every launcher and actor, also when this is interrupted."""
        limit_s = self._request.ending_s + _ANSWER_S
        running = [actor for actor, end in zip(self._actors, self._ends, strict=False) if end.is_running]
        try:
            if running:
                calls = [actor.stop.remote(limit_s) for actor in running]
                ray.wait(calls, num_returns=len(calls), timeout=limit_s + _ANSWER_S)
        finally:
            sys.stdout.flush()
            for actor in self._actors:
                ray.kill(actor)


@dataclass
class LauncherEnd:
    """The launcher of one node: its address, its last words and its exit code."""

    rank: int
    host: str = ""
    text: str = ""
    code: int | None = None
    is_running: bool = False  # started, and neither ended nor lost

    def add(self, text: str) -> None:
        """Keeps ``text`` as the newest words."""
        self.text = (self.text + text)[-_KEPT_CHARACTERS:]


def job_error(ends: Sequence[LauncherEnd]) -> LaunchError | None:
    """Returns the error of a job, None when every launcher ended with 0.

    It describes the node where the first worker failed; the other launchers only report that another node failed.
    """
    failed = [end for end in ends if end.code]
    if not failed:
        stuck = [f"{end.rank}" for end in ends if end.code is None]
        return LaunchError(f"The launchers of the nodes {', '.join(stuck)} did not end.") if stuck else None
    first = next((end for end in failed if _ELSEWHERE not in end.text), failed[0])
    assert first.code is not None
    # A launcher that a signal ended has a negative code; shells write 128 plus the signal.
    code = first.code if first.code > 0 else 128 - first.code
    lines = first.text[max(first.text.rfind(_REPORT), 0) :].splitlines()
    if _REPORT in first.text:
        lines = lines[1:]
    report = "\n".join(lines[-_LINES:])
    message = f"The launcher of node {first.rank} ({first.host}) ended with exit code {code}. Its last lines:\n{report}"
    if found := _FIRST.search(first.text):
        rank, host, path = found.groups()
        return WorkerFailedError(message, rank=int(rank), host=host, exit_code=code, log_path=path)
    return LaunchError(message, code)


class LauncherActor:
    """Starts a launcher, passes on its output, and stops it.

    Its methods take and return text and numbers, so that Ray pickles nothing else. The launcher ends when this process
    ends, see ``fleet/integrations/_tied_launcher.py``.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def place(self) -> tuple[str, int]:
        """Returns the address of this node and a free port."""
        host: str = ray.util.get_node_ip_address()
        return host, free_ports(1, host)[0]

    def start(
        self, flags: Sequence[str], log_dir: str, command: Sequence[str], folder: str, env: Mapping[str, str]
    ) -> str:
        """Starts the launcher; returns an empty text, or the reason why it could not start.

        Args:
            flags: flags of the launcher.
            log_dir: receives its log files; without ``folder`` it lies in the folder for temporary files.
            command: the script and its arguments.
            folder: its working folder; empty for the folder that Ray has unpacked, and removes after the job.
            env: variables added to the environment of this process.
        """
        logs = Path(log_dir) if folder else Path(tempfile.gettempdir()) / log_dir
        argv = [sys.executable, "-m", "fleet.integrations._tied_launcher", *flags, f"--log_dir={logs}", "--", *command]
        try:
            self._process = subprocess.Popen(
                argv,
                cwd=folder or None,
                env={**_own_environment(), **env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return f"the launcher cannot start in {folder!r} there: {error.strerror}"
        return ""

    def follow(self, limit_s: float) -> tuple[str, int | None]:
        """Returns the launcher's new output, and its exit code, None while it runs.

        Waits up to ``limit_s`` for either.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        ended = process.poll() is not None
        ready, _, _ = select.select([process.stdout], [], [], 0 if ended else limit_s)
        block = os.read(process.stdout.fileno(), _BLOCK) if ready else b""
        if block:
            return self._decoder.decode(block), None
        if not ended and ready:  # it has closed its output
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
            ended = process.poll() is not None
        return self._decoder.decode(b"", final=ended), process.returncode if ended else None

    def stop(self, limit_s: float) -> None:
        """Ends the launcher with its workers: SIGTERM, after ``limit_s`` SIGKILL; its guardian ends the rest."""
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGTERM)  # a no-op after its end
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline:
            self.follow(0.1)  # a full pipe would block the launcher
        if process.poll() is None:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _own_environment() -> dict[str, str]:
    """Returns this process's variables with the GPUs of the bundle, and without those of another job."""
    found = Environment().inherited()
    for name in SET_VARIABLES:
        if name not in _KEPT:
            found.pop(name, None)
    gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    # A blank value would count as not set, and the launcher would take every GPU of the machine.
    return {**found, "CUDA_VISIBLE_DEVICES": ",".join(gpus) or "-1"}
