"""A training with ``strategy.reproducible`` that is killed and resized, from one seed: in forks, or by the launcher.

As a script it is one worker: arguments are a folder, which holds ``case.json``, and the number of epochs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fleet
from tests.helpers.reproducible_training import Case, Training
from tests.helpers.workers import WorkerError, run_workers
from tests.launch.launcher import Launcher

__all__ = ["Disturbed", "in_forks", "launched", "undisturbed"]

FOREVER = 10_000  # epochs
# Where a save is killed: while blocks are written, before and after the checkpoint gets its name, while others go.
SAVING = ("save.begin", "save.block", "save.part", "save.manifest", "save.rename", "save.renamed", "save.prune")
_WORKER = "from tests.helpers.reproducible_elastic import main\n\nmain()\n"


@dataclass(frozen=True)
class Kill:
    """kill -9 of a worker, some seconds after a turn of it has begun.

    Attributes:
        rank: which worker.
        updates: how many it sees before.
        delay_s: how long after.
    """

    rank: int
    updates: int
    delay_s: float


@dataclass
class Disturbed:
    """A training that went through resizes and kills.

    Attributes:
        epochs: it has made.
        bits: with which each worker ended.
        losses: all that were printed, with the number of the update, also of updates that were made again.
        kills: of workers, by where: ``any`` is any moment.
        resizes: the numbers of workers, one after the other.
    """

    epochs: int
    bits: list[dict[str, Any]]
    losses: list[tuple[int, str]]
    kills: list[str]
    resizes: list[int]


# ---- a worker --------------------------------------------------------------------------------------------------------


def train_on(
    rank: int, world_size: int, case: Case, folder: str, stop_after: int = 0, kill: Kill | None = None
) -> dict[str, Any] | None:
    """Goes on where the newest checkpoint is; returns the bits at the end, ``None`` after ``stop_after`` updates."""
    training = Training(case)
    checkpoint = fleet.elastic.Checkpoint(
        f"{folder}/checkpoints", training.model, training.optimizer, training.scheduler,
        data=training.sampler, every=1, keep=2,
    )  # fmt: skip
    checkpoint.resume()
    begun = checkpoint.step
    for epoch in range(checkpoint.epoch, case.epochs):
        training.sampler.set_epoch(epoch)
        for x, y in training.sampler.batches(training.loader):
            done = checkpoint.step - begun
            if stop_after and done >= stop_after:
                return None
            if kill is not None and rank == kill.rank and done >= kill.updates:
                threading.Timer(kill.delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
                kill = None
            value = training.turn(x, y)
            if value is not None and rank == 0:
                note(folder, f"{os.getpid()} {checkpoint.step} {epoch} {value.hex()}")
    checkpoint.close()
    training.losses = []
    return training.bits()


def note(folder: str, line: str) -> None:
    """Appends a line to the losses, at once."""
    descriptor = os.open(f"{folder}/losses", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def noted(folder: Path) -> list[list[str]]:
    """Returns the words of each line: process, update, epoch, loss."""
    path = folder / "losses"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Runs one worker of the launcher."""
    folder = Path(sys.argv[1])
    case = replace(Case(**json.loads((folder / "case.json").read_text())), epochs=int(sys.argv[2]))
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    (folder / f"pid.{os.getpid()}").write_text(f"{rank}")
    bits = train_on(rank, 0, case, f"{folder}")
    fleet.save({"bits": bits}, str(folder / f"bits.{rank}"))


# ---- without disturbance ---------------------------------------------------------------------------------------------


def undisturbed(case: Case, epochs: int, folder: Path) -> Disturbed:
    """Returns the run of one process without a checkpoint before it."""
    folder.mkdir()
    whole = replace(case, epochs=epochs)
    bits = run_workers(train_on, 1, whole, f"{folder}", backend=None, timeout_s=600)
    return Disturbed(epochs, bits, _losses(folder), [], [1])


def _losses(folder: Path) -> list[tuple[int, str]]:
    return [(int(step), loss) for _, step, _, loss in noted(folder)]


def differences(found: Disturbed, right: Disturbed) -> list[str]:
    """Returns the losses of ``found`` that are not those of ``right`` at the same update."""
    known = {*right.losses}
    return [f"update {step}: {loss}" for step, loss in found.losses if (step, loss) not in known]


def _events(draws: random.Random, resizes: int, kills: int) -> list[str]:
    events = ["resize"] * resizes + ["kill"] * kills
    draws.shuffle(events)
    return events


def _other(draws: random.Random, case: Case, workers: int) -> int:
    return draws.choice([num for num in range(1, case.logical + 1) if num != workers])


# ---- in forks --------------------------------------------------------------------------------------------------------


def in_forks(case: Case, folder: Path, seed: int, resizes: int, kills: int) -> Disturbed:
    """Trains in processes that are forked; kills come at any moment and inside of saves, in equal shares."""
    folder.mkdir()
    draws = random.Random(seed)
    workers = draws.randint(1, case.logical)
    endless = replace(case, epochs=FOREVER)
    found = Disturbed(0, [], [], [], [workers])
    for event in _events(draws, resizes, kills):
        if event == "resize":
            run_workers(train_on, workers, endless, f"{folder}", draws.randint(1, 4), backend=None, timeout_s=120)
            workers = _other(draws, case, workers)
            found.resizes.append(workers)
            continue
        found.kills.append(_killed(endless, folder, workers, draws))
    found.epochs = _last_epoch(folder) + 2
    last = replace(case, epochs=found.epochs)
    found.bits = run_workers(train_on, workers, last, f"{folder}", backend=None, timeout_s=600)
    found.losses = _losses(folder)
    return found


def _killed(case: Case, folder: Path, workers: int, draws: random.Random) -> str:
    """Trains until a worker is killed; returns where."""
    point = draws.choice(["any", draws.choice(SAVING)])
    rank, updates = draws.randrange(workers), draws.randint(0, 3)
    kill = Kill(rank, updates, draws.uniform(0.0, 0.1)) if point == "any" else None
    # Worker 0 passes every point of a save; it stops the job where it passes this one less often.
    faults = {} if kill else {"FLEET_FAULTS": f"{point}:kill:rank=0:count={draws.randint(1, 3)}"}
    try:
        run_workers(
            train_on, workers, case, f"{folder}", 0 if kill else 20, kill,
            backend=None, timeout_s=120, environment=faults,
        )  # fmt: skip
    except WorkerError:
        return point
    raise AssertionError(f"nobody was killed at {point} on {workers} workers")


def _last_epoch(folder: Path) -> int:
    return max((int(epoch) for _, _, epoch, _ in noted(folder)), default=0)


# ---- by the launcher -------------------------------------------------------------------------------------------------


def launched(case: Case, folder: Path, seed: int, resizes: int, kills: int) -> Disturbed:
    """Trains under the launcher, which restarts the workers after a kill; a resize is a launch with another number."""
    folder.mkdir()
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    draws = random.Random(seed)
    workers = draws.randint(1, case.logical)
    found = Disturbed(0, [], [], [], [workers])
    for number, stretch in enumerate(_stretches(_events(draws, resizes, kills))):
        with _launch(folder, number, workers, FOREVER) as job:
            for _ in range(stretch):
                wait_for_updates(folder, draws.randint(1, 3), job)
                time.sleep(draws.uniform(0.0, 0.1))  # any moment
                _kill_one(folder, draws.randrange(workers))
                found.kills.append("any")
            wait_for_updates(folder, draws.randint(1, 3), job)
            time.sleep(draws.uniform(0.0, 0.1))
            job.signal(signal.SIGTERM)
            job.wait()
        _forget(folder)
        workers = _other(draws, case, workers)
        found.resizes.append(workers)
    found.epochs = _last_epoch(folder) + 2
    with _launch(folder, -1, workers, found.epochs) as job:
        assert job.wait(300.0) == 0, job.stderr[-3000:]
    found.bits = [fleet.load(str(folder / f"bits.{rank}"))["bits"] for rank in range(workers)]
    found.losses = _losses(folder)
    return found


def _stretches(events: list[str]) -> Iterator[int]:
    """Yields the numbers of kills before each resize; those after the last one come before it."""
    kills = 0
    left = events.count("resize")
    for place, event in enumerate(events):
        if event == "kill":
            kills += 1
        else:
            left -= 1
            yield kills + (0 if left else events[place:].count("kill"))
            kills = 0


def _launch(folder: Path, number: int, workers: int, epochs: int) -> Launcher:
    flags = (f"--nproc_per_node={workers}", "--max_restart=1000")
    args = (f"{folder}", f"{epochs}")
    return Launcher(folder / f"job{number}", _WORKER, *flags, args=args, env={"FLEET_PAGE": "0"})


def wait_for_updates(folder: Path, updates: int, job: Launcher, limit_s: float = 120.0) -> None:
    """Waits until the workers that were started last have made ``updates`` of them."""
    deadline = time.monotonic() + limit_s
    while True:
        living = {path.suffix[1:] for path in folder.glob("pid.*")}
        if sum(pid in living for pid, *_ in noted(folder)) >= updates:
            return
        if job.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{updates} updates were not made: {job.stderr[-3000:]}\n{job.log()[-3000:]}")
        time.sleep(0.01)


def _kill_one(folder: Path, rank: int) -> None:
    """kill -9 of the worker of that rank; those that are started next have other files."""
    pids = {path.read_text(): int(path.suffix[1:]) for path in folder.glob("pid.*")}
    _forget(folder)
    with suppress(ProcessLookupError):
        os.kill(pids[f"{rank}"], signal.SIGKILL)


def _forget(folder: Path) -> None:
    for path in folder.glob("pid.*"):
        path.unlink()
