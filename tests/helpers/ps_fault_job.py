"""A parameter-server job of real processes that are killed and started again while they train.

Servers and workers go through the public calls and the environment of a job that is started by hand. They are forked
from a process that has imported everything, so a restart costs little. Every worker keeps its optimizer's state in a
file and goes on from there; a server is given its folder and endpoint again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fleet as fleet_package
from fleet import fleet
from tests.helpers.served import _free_endpoints

__all__ = ["IDS", "FaultJob", "Kill", "Task", "Training", "expected_tables", "plan_kills"]

IDS = np.arange(60) * 10**12 + 7
NUM_WORDS = 30
WIDTH = 1500  # so that messages are large
EVERY = 3  # steps between the files of a worker
LIMIT_S = 120  # eight processes on a slow machine; what hangs, hangs longer


class IntegerModel(nn.Module):
    """A table of unbounded ids, an ``nn.Embedding`` and dense parameters, whose gradients are given integers."""

    def __init__(self) -> None:
        super().__init__()
        start = fleet_package.ps.Initializer("constant", 0.0)
        self.ads = fleet_package.SparseEmbedding(3, combiner="sum", initializer=start)
        self.words = nn.Embedding(NUM_WORDS, 2, sparse=True)
        self.out = nn.Linear(5, WIDTH)
        with torch.no_grad():
            for weight in (self.words.weight, self.out.weight, self.out.bias):
                weight.copy_(torch.arange(weight.numel(), dtype=torch.float32).view_as(weight))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns a sum whose derivatives are the factors of the batch."""
        total: Tensor = (
            (self.ads(batch["ads"]) * batch["by_ad"]).sum()
            + (self.words(batch["words"]) * batch["by_word"]).sum()
            + (self.out.weight * batch["weight"]).sum()
            + (self.out.bias * batch["bias"]).sum()
        )
        return total


def batch_of(rank: int, step: int) -> dict[str, np.ndarray]:
    """Returns ids and integer factors; multiples of 4, so that the mean over 4 workers is whole too."""
    rng = np.random.default_rng([rank, step])

    def factors(*shape: int) -> np.ndarray:
        return (rng.integers(-6, 7, shape) * 4).astype(np.float32)

    return {
        "ads": rng.choice(IDS, (8, 1)),
        "by_ad": factors(8, 3),
        "words": rng.integers(0, NUM_WORDS, 8),
        "by_word": factors(8, 2),
        "weight": factors(WIDTH, 5),
        "bias": factors(WIDTH),
    }


def expected_tables(num_workers: int, steps: int, *, mean: bool) -> dict[str, Tensor]:
    """Returns what the tables hold when every gradient was applied once, by SGD with rate 1."""
    model = IntegerModel()
    ads = np.zeros((len(IDS), 3), np.float32)
    words, weight, bias = (p.detach().numpy().copy() for p in (model.words.weight, model.out.weight, model.out.bias))
    for rank in range(num_workers):
        for step in range(steps):
            batch = batch_of(rank, step)
            scale = np.float32(1 / num_workers if mean else 1)
            np.subtract.at(ads, np.searchsorted(IDS, batch["ads"][:, 0]), batch["by_ad"] * scale)
            np.subtract.at(words, batch["words"], batch["by_word"] * scale)
            weight -= batch["weight"] * scale
            bias -= batch["bias"] * scale
    found = {"ads": ads, "words": words, "weight": weight, "bias": bias}
    return {name: torch.from_numpy(values) for name, values in found.items()}


# -- the processes ---------------------------------------------------------------------------------------------------


AfterStep = Callable[[int, int], None]  # is given the rank and the number of steps done


@dataclass(frozen=True)
class Task:
    """What is trained.

    Args:
        make: returns the model, which returns its loss.
        batch_of: returns what the model is given, by rank and step.
        tables_of: returns the tables of a connected model at the end.
    """

    make: Callable[[], nn.Module]
    batch_of: Callable[[int, int], Any]
    tables_of: Callable[[Any], dict[str, Tensor]]


def _integer_batch(rank: int, step: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in batch_of(rank, step).items()}


def _integer_tables(model: Any) -> dict[str, Tensor]:
    state = model.state_dict()
    tables = {"words": state["words.weight"], "weight": state["out.weight"], "bias": state["out.bias"]}
    return {"ads": model.module.ads.lookup_rows(torch.from_numpy(IDS)), **tables}


INTEGERS = Task(IntegerModel, _integer_batch, _integer_tables)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the processes train beside the mode.

    Args:
        task: what they train.
        prefetches: their loops are over ``fleet.prefetch``.
        limit_s: after this time a process is taken for one that hangs.
        rate: of SGD; with 1 every sum is exact, in whatever order.
        configs: further keys of ``a_sync_configs``.
        after_step: called by each worker after each of its steps.
        stream: the numbers of steps are events of a stream; a worker keeps nothing itself, the servers say where it
            goes on.
    """

    task: Task = INTEGERS
    prefetches: bool = False
    limit_s: int = LIMIT_S
    rate: float = 1.0
    configs: dict[str, Any] = field(default_factory=dict)
    after_step: AfterStep | None = None
    stream: bool = False


def _run(mode: str, variables: dict[str, str], folder: Path, name: str, steps: int, training: Training) -> None:
    """Is what every process does, from its start."""
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(2 * training.limit_s)  # whatever becomes of the test, this process ends
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for variable in [v for v in os.environ if v.startswith(("PADDLE_", "FLEET_", "FLAGS_"))]:
        del os.environ[variable]
    os.environ.update(variables)
    torch.set_num_threads(1)
    role = fleet.PaddleCloudRoleMaker()
    fleet.init(role)
    net = training.task.make()
    factory = fleet.StrategyFactory
    strategy = factory.create_sync_strategy() if mode == "sync" else factory.create_async_strategy()
    if mode != "sync":
        bound = {"max_staleness": 3} if mode == "bounded" else {}
        strategy.a_sync_configs = {"max_merge_var_num": 4, "send_wait_times": 1, **bound}
    if training.configs:
        strategy.a_sync_configs = training.configs
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), training.rate), strategy)
    model = fleet.distributed_model(net)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
    else:
        _train(model, optimizer, folder, steps, training)


def _keep(path: Path, state: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def _events(partition: int, offset: int, steps: int) -> Iterator[tuple[int, int]]:
    return ((step, step) for step in range(offset, steps))


def _steps_to_do(optimizer: Any, kept: Path, steps: int, training: Training) -> Iterable[int]:
    """Connects, and returns the steps that this process does."""
    if training.stream:
        fleet.init_worker()
        opened = partial(_events, steps=steps)
        settings: dict[str, Any] = {"partitions": int(fleet.worker_num()), "name": "steps"}
        return fleet_package.StreamDataset(opened, int, batch_size=1, collate=lambda samples: samples[0], **settings)
    first = 0
    if kept.exists():
        state = torch.load(kept, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    fleet.init_worker()
    if not kept.exists():
        _keep(kept, {"step": 0, "optimizer": optimizer.state_dict()})
    return range(first, steps)


def _train(model: Any, optimizer: Any, folder: Path, steps: int, training: Training) -> None:
    rank = int(fleet.worker_index())
    kept = folder / f"worker-{rank}.pt"
    after_step = training.after_step
    todo = _steps_to_do(optimizer, kept, steps, training)
    progress = os.open(folder / f"worker-{rank}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    batches: Iterable[tuple[int, Any]] = ((step, training.task.batch_of(rank, step)) for step in todo)
    for step, batch in fleet.prefetch(batches) if training.prefetches else batches:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        os.write(progress, b"%d\n" % (step + 1))
        if after_step is not None:
            after_step(rank, step + 1)
        if (step + 1) % EVERY == 0 and not training.stream:
            _keep(kept, {"step": step + 1, "optimizer": optimizer.state_dict()})
        if step in (steps // 4, steps // 2) and rank == 1:
            # Restarts begin with it and the journal after it.
            fleet.session.server_job.trainer.connection.client.snapshot()
    fleet.save_persistables(folder / "tables")
    if rank == 0:
        optimizer.state_dict()  # takes the parameters, to which the others have added since this worker's last step
        torch.save(training.task.tables_of(model), folder / "found.pt")
    fleet.stop_worker()


# -- the one who starts them -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """``name`` is killed as soon as the workers have done ``steps`` steps, all together."""

    steps: int
    name: str


def plan_kills(seed: int, count: int, names: Sequence[str], total_steps: int) -> list[Kill]:
    """Returns kills at random points, the last while much is left to be done."""
    rng = random.Random(seed)
    points = sorted(rng.randrange(4, total_steps * 4 // 5) for _ in range(count))
    return [Kill(steps, rng.choice(names)) for steps in points]


class FaultJob:
    """Servers and workers as processes; leaves none of them behind.

    Args:
        folder: an empty folder for everything the job writes.
        mode: ``"sync"``, ``"async"``, or ``"bounded"``: async with a bound on staleness.
        num_servers, num_workers, steps: the size of the job.
        training: how its processes train.
        standby: every server has a standby; a killed server loses its folder and does not come back.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        *,
        num_servers: int,
        num_workers: int,
        steps: int,
        training: Training = Training(),
        standby: bool = False,
    ) -> None:
        folder.mkdir()
        self.training = training
        self.folder, self.mode, self.steps, self.num_workers = folder, mode, steps, num_workers
        self.context = multiprocessing.get_context("forkserver")
        endpoints = _free_endpoints(num_servers)
        shared = {
            "PADDLE_PSERVERS_IP_PORT_LIST": ",".join(endpoints),
            "PADDLE_TRAINERS_NUM": f"{num_workers}",
            "FLEET_PS_FOLDER": str(folder / "state"),
            "FLEET_PS_DEADLINE": f"{LIMIT_S}",
        }
        self.variables: dict[str, dict[str, str]] = {}
        self.standby = standby
        if standby:
            self._add_standbys(shared, num_servers)
        for index, endpoint in enumerate(endpoints):
            host, _, port = endpoint.partition(":")
            role = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
            self.variables[f"server-{index}"] = {**shared, **role}
        for rank in range(num_workers):
            role = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": f"{rank}"}
            self.variables[f"worker-{rank}"] = {**shared, **role}
        self.names = list(self.variables)
        self.processes: dict[str, Any] = {}
        self.pids: list[int] = []

    def _add_standbys(self, shared: dict[str, str], num_servers: int) -> None:
        standbys = _free_endpoints(num_servers)
        shared["FLEET_PS_STANDBY_ENDPOINTS"] = ",".join(standbys)
        for index, endpoint in enumerate(standbys):
            host, _, port = endpoint.partition(":")
            role = {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port, "FLEET_PS_STANDBY": "1"}
            self.variables[f"standby-{index}"] = {**shared, **role}

    def start(self, name: str) -> None:
        """Starts a process, again if it ran before."""
        arguments = (self.mode, self.variables[name], self.folder, name, self.steps, self.training)
        process = self.context.Process(target=_run, args=arguments, daemon=True)
        process.start()
        self.processes[name] = process
        self.pids.append(int(process.pid or 0))

    def run(self, kills: Sequence[Kill], limit_s: float = LIMIT_S) -> dict[str, Tensor]:
        """Trains, kills on the way, and returns what the tables held at the end.

        Raises:
            AssertionError: a process failed by itself, or the job did not end in time.
        """
        deadline, waiting = time.monotonic() + limit_s, list(kills)
        try:
            for name in self.names:
                self.start(name)
            while any(process.exitcode is None for process in self.processes.values()):
                assert time.monotonic() < deadline, f"hangs at {self.progress()} steps: {self.logs()}"
                codes = {name: process.exitcode for name, process in self.processes.items()}
                assert not any(codes.values()), f"{codes}: {self.logs()}"
                while waiting and self.progress() >= waiting[0].steps:
                    name = waiting.pop(0).name
                    self.kill(name)
                    if self.standby and name.startswith("server"):
                        shutil.rmtree(self.folder / "state" / name)
                        del self.processes[name]
                    else:
                        self.start(name)
                time.sleep(0.002)
        finally:
            for process in self.processes.values():
                process.kill()
                process.join()
        assert not waiting, f"these never happened: {waiting}"
        codes = {name: process.exitcode for name, process in self.processes.items()}
        assert not any(codes.values()), f"{codes}: {self.logs()}"
        found: dict[str, Tensor] = torch.load(self.folder / "found.pt", weights_only=True)
        return found

    def kill(self, name: str) -> None:
        """Ends a running process with SIGKILL."""
        process = self.processes[name]
        assert process.exitcode is None, f"{name} has ended before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        code = process.exitcode
        assert code == -signal.SIGKILL, f"{name} has ended with {code} before it could be killed: {self.logs()}"

    def progress(self) -> int:
        """Returns how many steps have been done; those that a worker repeats count once."""
        found = 0
        for rank in range(self.num_workers):
            with contextlib.suppress(OSError):
                lines = (self.folder / f"worker-{rank}.steps").read_bytes().split()
                found += max(map(int, lines), default=0)
        return found

    def repeated(self) -> int:
        """Returns how many steps were done once more after a restart."""
        count = sum(
            len((self.folder / f"worker-{rank}.steps").read_bytes().split()) for rank in range(self.num_workers)
        )
        return count - self.progress()

    def orphans(self) -> list[int]:
        """Returns the sessions of started processes in which something still runs, after a moment's patience."""
        left, deadline = list(self.pids), time.monotonic() + 5
        while left and time.monotonic() < deadline:
            left = [pid for pid in left if _is_group(pid)]
            time.sleep(0.05)
        return left

    def logs(self, last_bytes: int = 1500) -> str:
        """Returns the end of every log."""
        parts = (f"== {path.name}\n{path.read_text()[-last_bytes:]}" for path in sorted(self.folder.glob("*.log")))
        return "\n".join(parts)


def _is_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    return True
