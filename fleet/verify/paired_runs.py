"""Starts the processes of both runs, notices those that wait for each other, and reads their records."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fleet.env import Environment
from fleet.errors import FleetError
from fleet.verify.changed_files import put_back
from fleet.verify.record_files import read_record

Starter: TypeAlias = Callable[[dict[str, Any]], int]  # starts the process of a plan; returns its id

_MOST_ENTRIES = 5000
_LOOK_EVERY_S = 0.05
_STILL_S = 3.0
_STILL_SHARE = 0.04  # of a core: what watching threads use while the main thread waits
_AFTER_FAILURE_S = 3.0
_WAITING = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/", "/fleet/checks/roll_call")


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """What to run: the script with its arguments, the updates to make, the seconds a run may take.

    ``text`` is run in place of what the file holds, and only tried: see ``tried_script``.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 2
    steps: int = 6
    strategy: str = ""
    timeout_s: float = 300.0
    text: str = ""


@dataclass(kw_only=True)
class Run:
    """One run: the documents of each rank, and how it ended.

    ``stuck`` is True where all processes waited for each other; ``late`` where the time was over. ``stacks`` has the
    innermost frames of each rank that had not ended by then, as file:line. ``left`` names the files that the run
    changed and that could not be put back.
    """

    folder: Path
    records: list[list[dict[str, Any]]] = field(default_factory=list)
    seconds: float = 0.0
    training_s: float = 0.0
    stuck: bool = False
    late: bool = False
    stacks: dict[int, list[str]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def of_kind(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """Returns the documents of one kind that ``rank`` wrote."""
        return [one for one in self.records[rank] if one["kind"] == kind]

    def updates(self, rank: int) -> list[dict[str, Any]]:
        """Returns the updates of ``rank`` in order."""
        return self.of_kind(rank, "update")

    def end(self, rank: int) -> dict[str, Any]:
        """Returns how the script of ``rank`` ended; ``how`` is "killed" where it did not."""
        found = self.of_kind(rank, "end")
        return found[-1] if found else {"how": "killed", "error": ""}

    def log(self, rank: int) -> str:
        """Returns the last lines that ``rank`` printed."""
        path = self.folder / f"rank{rank}.log"
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]) if path.exists() else ""


def start_run(
    start: Starter,
    request: VerifyRequest,
    folder: Path,
    workers: int,
    *,
    sources: Sequence[Path] = (),
    scheduled: dict[str, list[dict[str, Any]]] | None = None,
    synced: bool = False,
    noise: float = 0.0,
    beside: Run | None = None,
    in_turn: bool = False,
    alike: Run | None = None,
) -> Run:
    """Runs the script as ``workers`` processes and returns when all have ended, wait for each other, or are late.

    ``sources`` are the folders of the workers' records that one process replays, ``scheduled`` the learning rates and
    momenta that it takes; ``synced`` computes batch norm over all rows. Each of its gradients is changed by ``noise``,
    relative; it ends where that has led it far away from the run ``beside``. ``in_turn`` gives it the workers' batches
    and draws one after the other. All workers draw the single numbers that worker 0 had in the run ``alike``.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True)
    began = time.perf_counter()
    run = Run(folder=folder)
    place = _own_folder(Path.cwd(), folder / "cwd")
    shared = {"place": str(place), "scheduled": scheduled or {}, "synced": synced, "noise": noise}
    shared |= {"in_turn": in_turn, "alike": str(alike.folder / "rank0") if alike is not None else ""}
    shared["replicas"] = 1 if in_turn else len(sources)
    shared["beside"] = str(beside.folder / "rank0") if beside is not None else ""
    processes = [
        start({**_plan(request, folder, rank, sources), **shared, "environment": environment})
        for rank, environment in enumerate(_environments(workers))
    ]
    try:
        _watch(run, processes, request.timeout_s)
    finally:
        (folder / "go").touch()
        _end(processes)
        run.left = put_back(folder)
    run.records = [read_record(folder / f"rank{rank}") for rank in range(workers)]
    run.seconds = time.perf_counter() - began
    run.training_s = max([float(run.end(rank).get("seconds", 0.0)) for rank in range(workers)])
    options = folder / "rank0" / "options.json"
    run.options = json.loads(options.read_text(encoding="utf-8")) if options.exists() else {}
    return run


def _plan(request: VerifyRequest, folder: Path, rank: int, sources: Sequence[Path]) -> dict[str, Any]:
    """Returns what the process of ``rank`` is told."""
    return {
        "script": str(request.script),
        "arguments": [_reaching(argument) for argument in request.arguments],
        "folder": str(folder / f"rank{rank}"),
        "rank": rank,
        "steps": request.steps,
        "text": request.text,
        "strategy": request.strategy,
        "sources": [str(source) for source in sources],
        "go": str(folder / "go"),
        "log": str(folder / f"rank{rank}.log"),
    }


def _environments(workers: int) -> list[dict[str, str]]:
    """Returns the variables of each worker of a job."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(workers)}
    shared["LOCAL_WORLD_SIZE"] = shared["WORLD_SIZE"]
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(workers)]


def _own_folder(folder: Path, made: Path) -> Path:
    """Returns a folder with links to all that is in ``folder``: what one run writes there, the next does not find.

    It stands in folders like the two around ``folder``, so that "../data" is found. One with very many entries is
    returned as it is.
    """
    if len(os.listdir(folder)) > _MOST_ENTRIES:
        return folder
    for place in (*reversed(folder.parents[:2]), folder):
        made = made / place.name
        made.mkdir(parents=True)
        inside = "" if place == folder else folder.relative_to(place).parts[0]
        with suppress(OSError):  # a folder above may be closed to this user
            names = os.listdir(place)
            for name in names if len(names) <= _MOST_ENTRIES else ():
                if name != inside and not made.is_relative_to(place / name):
                    (made / name).symlink_to(place / name)
    return made


def _reaching(argument: str) -> str:
    """Returns ``argument`` with a path that leaves the folder by ".." made absolute."""
    name, equals, value = argument.rpartition("=")
    path = Path(value)
    leaves = ".." in path.parts and not path.is_absolute() and path.exists()
    return f"{name}{equals}{path.resolve()}" if leaves else argument


@contextmanager
def process_starter(folder: Path) -> Iterator[Starter]:
    """Gives a function that starts a process of a run at once: a fork of one that has imported torch.

    What that one prints goes to ``folder``. Its forks end with it.
    """
    inherited = Environment().inherited()
    kept = {k: v for k, v in inherited.items() if not k.startswith(("PADDLE_", "TORCHELASTIC_", "SLURM_", "OMPI_"))}
    paths = [str(Path(p).absolute()) for p in kept.get("PYTHONPATH", "").split(os.pathsep) if p]
    env = {
        "OMP_NUM_THREADS": "1",
        "FLEET_WAIT_LIMIT": "5",
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join([_package_folder(), *paths]),
    }
    said = folder / "starter.log"
    command = [sys.executable, "-P", "-m", "fleet.verify.script_runner"]
    with (
        said.open("wb") as log,
        subprocess.Popen(
            command, bufsize=0, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        orders: Any = process.stdin
        answers: Any = process.stdout

        def start(plan: dict[str, Any]) -> int:
            with suppress(BrokenPipeError):
                orders.write(json.dumps(plan).encode() + b"\n")
            answer = answers.readline()
            if not answer:
                raise FleetError(f"No process could be started:\n{said.read_text(encoding='utf-8')[-2000:]}")
            return int(answer)

        yield start


def _package_folder() -> str:
    """Returns the folder that ``import fleet`` was found in."""
    import fleet

    return str(Path(str(fleet.__file__)).absolute().parent.parent)


def _watch(run: Run, processes: Sequence[int], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    failed_since: float | None = None
    still_since, used = time.monotonic(), _used(processes)
    while True:
        done = [(run.folder / f"rank{rank}" / "done").exists() for rank in range(len(processes))]
        over = [finished or _has_ended(process) for finished, process in zip(done, processes, strict=True)]
        now = time.monotonic()
        if all(over):
            return
        if any(over) and _has_failed(run, over):
            failed_since = failed_since or now
        if failed_since is not None and now - failed_since > _AFTER_FAILURE_S:
            run.stacks = _stacks(run, processes, over)
            return
        if now > deadline:
            run.late, run.stacks = True, _stacks(run, processes, over)
            return
        if now - still_since >= _STILL_S:
            spent = _used(processes)
            waiting = [i for i, finished in enumerate(over) if not finished]
            idle = all(spent[i] - used[i] < _STILL_SHARE * (now - still_since) for i in waiting)
            idle = idle and not any(_is_ready(processes[i]) for i in waiting)
            stacks = _stacks(run, processes, over) if idle else {}
            if idle and all(_is_waiting(stacks.get(i, [])) for i in waiting):
                run.stuck, run.stacks = True, stacks
                return
            still_since, used = now, spent
        time.sleep(_LOOK_EVERY_S)


def _has_failed(run: Run, over: Sequence[bool]) -> bool:
    for rank, finished in enumerate(over):
        if finished:
            end = read_record(run.folder / f"rank{rank}", "end")
            if not end or end[-1]["how"] == "failed":
                return True
    return False


def _used(processes: Sequence[int]) -> list[float]:
    """Returns the seconds of processor time that each process has used."""
    ticks = [_facts(process)[11:13] for process in processes]
    return [sum(map(int, of_one)) / os.sysconf("SC_CLK_TCK") for of_one in ticks]


def _has_ended(process: int) -> bool:
    return _facts(process)[0] in "ZX"


def _is_ready(process: int) -> bool:
    """Returns whether a thread would go on if it had a core or its disk: on a busy machine it may get next to none.

    The main thread of a worker waits while other threads of it exchange a gradient.
    """
    states = []
    for thread in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            states.append(_fields(thread)[0])
    return "R" in states or "D" in states


def _facts(process: int) -> list[str]:
    """Returns what the system says of a process, its state first; the starter keeps one that has ended as a zombie."""
    try:
        return _fields(Path(f"/proc/{process}/stat"))
    except OSError:
        return ["X", *["0"] * 20]


def _fields(stat: Path) -> list[str]:
    """Returns the fields of a stat file after the name of the program, which may hold blanks."""
    return stat.read_text(encoding="utf-8").rpartition(")")[2].split()


def _stacks(run: Run, processes: Sequence[int], over: Sequence[bool]) -> dict[int, list[str]]:
    """Returns the frames of each process that still runs, innermost first, as file:line."""
    found: dict[int, list[str]] = {}
    for rank, process in enumerate(processes):
        if over[rank] or _has_ended(process):
            continue
        path = run.folder / f"rank{rank}" / "stacks.txt"
        if not path.exists():
            continue
        before = path.stat().st_size
        os.kill(process, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while path.stat().st_size == before and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.05)
        lines = path.read_bytes()[before:].decode("utf-8", "replace").splitlines()
        found[rank] = [_frame(line) for line in lines if line.strip().startswith("File ")]
    return found


def _frame(line: str) -> str:
    file, _, rest = line.strip().removeprefix('File "').partition('", line ')
    return f"{file}:{rest.partition(' ')[0]}"


def _is_waiting(frames: Sequence[str]) -> bool:
    return any(part in frame for frame in frames[:4] for part in _WAITING)


def _end(processes: Sequence[int]) -> None:
    """Returns once the processes have ended; those that have not after a while are killed."""
    deadline = time.monotonic() + 3.0
    while not all(map(_has_ended, processes)):
        for process in processes if time.monotonic() > deadline else ():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
