"""Workers that stay: a gloo group is started once, and each draw is one more ``fleet.init`` in the same processes."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import fleet
from fleet.errors import FleetError
from tests.helpers.workers import free_ports, worker_environment
from tests.properties.loops import LOOPS, Job
from tests.properties.models import MODELS, optimizer_of

LIMIT_S = 20.0  # for one draw; the first of a pool also imports
STARTED_S = 60.0
COMPILED_S = 200.0
WAIT_LIMIT_S = "4"  # a worker that waits for one that cannot come says so within this time
STRAGGLERS_S = 6.0  # for the others, after one worker has raised


class Pool:
    """The processes of one number of workers; a pool in which a draw hangs is started again."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        ports = free_ports(self.workers + 1)
        for rank in range(self.workers):
            ours, theirs = context.Pipe()
            environment = worker_environment(rank, self.workers, ports) | {"FLEET_WAIT_LIMIT": WAIT_LIMIT_S}
            process = context.Process(target=serve, args=(theirs, environment, rank), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self.limit_s = STARTED_S

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
            process.close()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def send(self, composition: dict[str, Any]) -> None:
        """Hands a draw to all workers."""
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            with contextlib.suppress(ConnectionError):  # a worker that has died is found when it does not answer
                pipe.send_bytes(json.dumps(composition).encode())
        if composition["options"].get("to_static"):
            self.limit_s = COMPILED_S

    def results(self) -> list[dict[str, Any]]:
        """Returns what each worker reports; a worker that does not come back has ``"hangs"`` as its outcome."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self.limit_s
        while len(found) < self.workers and time.monotonic() < deadline:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in found]
            for pipe in wait(waiting, max(0.0, deadline - time.monotonic())):
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    found[rank] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=True)  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    found[rank] = {"outcome": "died"}
                if not found[rank]["outcome"].startswith("trained"):
                    deadline = min(deadline, time.monotonic() + STRAGGLERS_S)
        self.limit_s = LIMIT_S
        outcomes = [found.get(rank, {"outcome": "hangs", "moved": True}) for rank in range(self.workers)]
        kinds = {result["outcome"].partition(":")[0] for result in outcomes}
        if kinds & {"hangs", "died"} or len(kinds) > 1 or kinds == {"error"}:
            self.stop()  # collectives may be out of step
        return outcomes


def serve(pipe: Connection, environment: dict[str, str], rank: int) -> None:
    """Trains what comes through ``pipe`` until its other end is closed."""
    os.environ.update(environment)
    silent = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(silent, descriptor)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while True:
        try:
            made = json.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)
        out = io.BytesIO()
        torch.save(train(made, rank), out)
        pipe.send_bytes(out.getvalue())
        end_of_draw()


def end_of_draw() -> None:
    """Ends the groups that the draw has made; the common one stays for the next.

    So do those of a mesh of two axes: torch remembers by the mesh's ranks what it has done, and with it the groups.
    """
    if dist.is_initialized():
        world = dist.group.WORLD
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not world and dist.get_world_size(group) == dist.get_world_size():
                dist.destroy_process_group(group)
    gc.collect()
    if not gc.get_freeze_count():
        gc.freeze()  # looking at all of torch after each draw would take ten times as long as the draw


def train(made: dict[str, Any], rank: int) -> dict[str, Any]:
    """Runs one draw on this worker; returns its outcome, its state, and whether anything was updated."""
    before: list[torch.Tensor] = []
    models: list[Any] = []
    try:
        models, run = prepared(made, rank)
        before = [local(p).detach().clone() for model in models for p in model.parameters()]
        run()
        values = {f"{i}.{n}": v for i, model in enumerate(models) for n, v in model.full_state_dict().items()}
        return {"outcome": "trained", "moved": True, "values": values}
    except FleetError as error:
        return {"outcome": f"refused: {type(error).__name__}: {error}", "moved": has_moved(models, before)}
    except Exception as error:
        text = f"error: {type(error).__name__}: {str(error)[:400]}\n{traceback.format_exc()[-1200:]}"
        return {"outcome": text, "moved": has_moved(models, before)}


def prepared(made: dict[str, Any], rank: int) -> tuple[list[Any], Any]:
    """Returns the wrapped models and a function that runs the loop."""
    strategy = fleet.DistributedStrategy()
    strategy.update(made["options"])
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(rank)
    example, loop = MODELS[made["model"]](), LOOPS[made["loop"]]
    nets = example.nets()
    inner = [optimizer_of(made["rule"], net.parameters()) for net in nets]
    if loop.hook is not None:
        for one in inner:
            one.register_step_pre_hook(loop.hook)
    if loop.parameter_hook is not None:
        for p in (p for net in nets for p in net.parameters() if p.requires_grad):
            p.register_post_accumulate_grad_hook(loop.parameter_hook)
    if made["optimizer_first"]:
        optimizers = [fleet.distributed_optimizer(one) for one in inner]
        models = [fleet.distributed_model(net) for net in nets]
    else:
        models = [fleet.distributed_model(net) for net in nets]
        optimizers = [fleet.distributed_optimizer(one) for one in inner]
    example.after_wrap(nets)
    job = Job(example, models, optimizers, inner, fleet.data_rank(), made["steps"])
    return models, lambda: loop.run(job)


def has_moved(models: list[Any], before: list[torch.Tensor]) -> bool:
    """Returns whether a parameter changed; asp sets some to zero at the first forward, which is no step."""
    after = [local(p) for model in models for p in model.parameters()]
    return any(bool(((old != new) & (new != 0)).any()) for old, new in zip(before, after, strict=False))


def local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
