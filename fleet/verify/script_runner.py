"""``python -m fleet.verify.script_runner``: runs a script as processes of a comparison.

Each line of its input is a plan in JSON: script, arguments, variables, folder for the record, steps, strategy file,
folders of the workers' records (for the single process), learning rates. A process that has torch is forked for it.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch._dynamo  # an optimizer imports it when it is made; here once for all processes
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fleet import facade
from fleet.checks.copies import Copies
from fleet.env import export
from fleet.job.roll_call import RollCall
from fleet.options import DistributedStrategy
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper
from fleet.strategies._shared.update_rule import RuleWrapper
from fleet.strategies.pipeline import micro_batches
from fleet.strategies.pipeline.step import PipelineStep
from fleet.trackers.run_log import RunLog
from fleet.training.fleet_optimizer import FleetOptimizer
from fleet.verify.changed_files import ChangedFiles
from fleet.verify.draw_replay import Draws, install_draws
from fleet.verify.loader_replay import ReplayedBatches, install_batches
from fleet.verify.number_findings import until_lost
from fleet.verify.record_files import RecordFile
from fleet.verify.run_recording import Recording, StopTraining
from fleet.verify.user_lines import is_library, user_site

# What only says how the work is divided or exchanged: one process trains without it.
DIVIDING = (
    "sharding",
    "tensor_parallel",
    "recompute",
    "fp16_allreduce",
    "localsgd",
    "adaptive_localsgd",
    "dgc",
    "to_static",
    "use_hierarchical_allreduce",
    "sync_batch_norm",
)
_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "gather", "scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "all_gather_object", "gather_object",
    "broadcast_object_list", "monitored_barrier",
)  # fmt: skip
_PARENT_AWAY_S = 600.0


def main() -> None:
    """Starts a process for each plan and prints its id; ends them when there are no more plans."""
    started: list[int] = []
    for line in sys.stdin:
        parent, process = os.getpid(), os.fork()
        if not process:
            _become(json.loads(line) | {"parent": parent})
        started.append(process)
        print(process, flush=True)
    for process in started:  # one that has ended is kept as a zombie until now, so that its id stays its own
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _become(plan: dict[str, Any]) -> NoReturn:
    """Makes this process the one of ``plan``."""
    try:
        with open(plan["log"], "wb") as log, open(os.devnull, "rb") as nothing:
            for own, file in ((0, nothing), (1, log), (2, log)):
                os.dup2(file.fileno(), own)
        os.chdir(plan["place"])
        export(plan["environment"])
        _train(plan)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _train(plan: dict[str, Any]) -> NoReturn:
    """Runs the script of ``plan``, and ends this process when the others need it no more."""
    rank = plan["rank"]
    record = RecordFile(Path(plan["folder"]))
    stacks = (record.folder / "stacks.txt").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 + rank)
    sources = [Path(source) for source in plan["sources"]]
    draws = Draws(record.folder, sources)
    loading = _Loading(draws)
    batches = ReplayedBatches(record, loading, sources)
    recording = Recording(record, batches, draws, plan["steps"], plan["rates"])
    recording.initial = Path(plan["initial"]) if plan["initial"] else None
    recording.noise = plan["noise"]
    if plan["beside"]:
        recording.is_enough = until_lost(Path(plan["beside"]))
    _install(recording, draws, batches, plan, alone=bool(sources))
    ChangedFiles(record.folder.parent, lambda: draws.window > 0, lambda text: record.write("note", text=text)).watch()
    started = time.perf_counter()
    how, error = _run_script(plan)
    record.write(
        "end", how=how, error=error, seconds=time.perf_counter() - started, unequal_draws=draws.unequal,
        counts=recording.counts(), **recording.coverage(),
    )  # fmt: skip
    sys.stdout.flush()
    sys.stderr.flush()
    (record.folder / "done").touch()
    _wait_for_parent(plan)
    os._exit(0)


class _Loading:
    """Says whether a DataLoader is at work; the training loop begins with the first batch."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def __call__(self, entered: bool) -> None:
        self._draws.active = not entered


def _run_script(plan: dict[str, Any]) -> tuple[str, str]:
    """Returns how the script ended, and the text of its error."""
    script = plan["script"]
    sys.argv = [script, *plan["arguments"]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except StopTraining:
        return "stopped", ""
    except SystemExit as stop:
        return ("ended", "") if not stop.code else ("failed", f"SystemExit: {stop.code}")
    except BaseException as error:
        places = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        own = [place for place in places if not is_library(place.rpartition(":")[0])]
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}\n@{own[-1] if own else ''}"
    return "ended", ""


def _wait_for_parent(plan: dict[str, Any]) -> None:
    """Keeps sockets and the store open until the other workers need them no more."""
    deadline = time.monotonic() + _PARENT_AWAY_S
    go = Path(plan["go"])
    while not go.exists() and time.monotonic() < deadline and os.getppid() == plan["parent"]:
        time.sleep(0.02)


def _install(
    recording: Recording, draws: Draws, batches: ReplayedBatches, plan: dict[str, Any], *, alone: bool
) -> None:
    install_batches(batches)
    install_draws(draws)
    backward = recording.around_backward(torch.autograd.backward)
    torch.autograd.backward = backward
    register_module_forward_pre_hook(_before(recording))
    register_module_forward_hook(recording.after_forward, always_call=True)
    register_optimizer_step_pre_hook(recording.before_update)
    register_optimizer_step_post_hook(recording.after_update)
    PipelineStep.losses = recording.around_losses(PipelineStep.losses)  # type: ignore[method-assign]
    FleetOptimizer.step = recording.around_step(FleetOptimizer.step)  # type: ignore[method-assign]
    RuleWrapper.step = _rule_step(recording, RuleWrapper.step)  # type: ignore[method-assign]
    _watch_optimizers(recording)
    _watch_collectives(recording.record)
    _choose_options(plan, alone)
    if alone:
        functional.batch_norm = _in_parts(functional.batch_norm, plan, recording)
        pieces: Any = micro_batches
        pieces._rows = _by_copy(pieces._rows, plan["replicas"])


def _before(recording: Recording) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.RNNBase) and module.dropout:
            module.dropout = 0.0  # its draws are made inside torch and cannot be replaced
            recording.record.write("note", text="dropout inside recurrent layers was off in both runs")
        recording.before_forward(module, inputs)
        if recording._stack[-1][1] and not any(noted for _, noted in recording._stack[:-1]):
            recording.entry_buffers(module)

    return before


def _rule_step(recording: Recording, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the step of Fleet's own update rules, which then tells of its update as torch's optimizers do."""

    @wraps(step)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording.before_update(self)
        result = step(self, *args, **kwargs)
        recording.after_update(self)
        return result

    return run


def _watch_optimizers(recording: Recording) -> None:
    build = Optimizer.__init__

    @wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        if not isinstance(self, OptimizerWrapper):
            recording.optimizers.append(weakref.ref(self))

    Optimizer.__init__ = built  # type: ignore[method-assign]


def _watch_collectives(record: RecordFile) -> None:
    inside = [0]

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            own = not inside[0] and not is_library(sys._getframe(1).f_code.co_filename)
            if own and (group is None or group is dist.group.WORLD):
                record.write("collective", name=f"torch.distributed.{name}", where=user_site())
            inside[0] += 1
            try:
                return original(*args, **kwargs)
            finally:
                inside[0] -= 1

        return run

    for name in _COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, watched(name, getattr(dist, name)))
    meet = RollCall.meet

    @wraps(meet)
    def met(self: Any, call: str, *args: Any, **kwargs: Any) -> Any:
        if not inside[0]:
            record.write("collective", name=call, where=user_site())
        inside[0] += 1
        try:
            return meet(self, call, *args, **kwargs)
        finally:
            inside[0] -= 1

    RollCall.meet = met  # type: ignore[method-assign]


def _choose_options(plan: dict[str, Any], alone: bool) -> None:
    """Makes ``fleet.init`` take the strategy of ``--strategy``; one process leaves out what divides the work."""
    place: Any = facade
    start = place.start_session

    def started(role_maker: Any, is_collective: bool, options: Any) -> Any:
        if plan["strategy"]:
            options = DistributedStrategy.load(plan["strategy"])
        if alone:
            options = alone_options(options, plan["replicas"])
        session = start(role_maker, is_collective, options)
        listeners = session.job.listeners
        listeners.remove(listeners.get(Copies))  # the comparison names more than that copies came apart
        values = {name: True for name in _switches(session.options)}
        Path(plan["folder"], "options.json").write_text(json.dumps(values), encoding="utf-8")
        return session

    place.start_session = started
    # A comparison is no run that anybody wants to see among his own.
    run_log: Any = RunLog
    run_log.choose = lambda log, options: None


def _switches(options: Any) -> list[str]:
    from fleet.strategies import REGISTRY

    return [name for name, one in REGISTRY.items() if one.default is False and options[name]]


def alone_options(options: Any, copies: int) -> Any:
    """Returns the options that one process trains with on the batches of ``copies`` of the model, joined.

    These are the ones that change what is computed. A micro-batch has the rows of all copies.
    """
    made = copy.deepcopy(options)
    for name in DIVIDING:
        if made[name]:
            setattr(made, name, False)
    if made["pipeline"]:
        made.pipeline_configs = {"micro_batch_size": copies * made["pipeline_configs"].micro_batch_size}
    if made.is_set("hybrid_configs"):
        made.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sharding_degree": 1, "sep_degree": 1}
    return made


def _by_copy(cut: Callable[..., list[Tensor]], copies: int) -> Callable[..., list[Tensor]]:
    """Returns the cut of a batch into micro-batches, each of which then has the rows of that of every copy."""

    @wraps(cut)
    def rows(tensor: Tensor, name: str, num_micro: int, size: int) -> list[Tensor]:
        whole = cut(tensor, name, num_micro, size)
        if copies < 2 or len(tensor) % copies or size % copies:
            return whole
        return [
            torch.cat(own) for own in zip(*(part.split(size // copies) for part in tensor.chunk(copies)), strict=True)
        ]

    return rows


def _in_parts(original: Callable[..., Tensor], plan: dict[str, Any], recording: Recording) -> Callable[..., Tensor]:
    """Returns batch norm with the statistics of each worker's samples; worker 0's are the ones that are kept."""

    @wraps(original)
    def normed(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        parts = plan["replicas"]
        synced = plan["synced"] or isinstance(recording._stack[-1][0] if recording._stack else None, nn.SyncBatchNorm)
        if not training or synced or parts < 2 or input.shape[0] % parts or not torch.is_grad_enabled():
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        made = []
        for i, rows in enumerate(input.chunk(parts)):
            kept = (running_mean, running_var) if i == 0 else (None, None)
            made.append(original(rows, *kept, weight, bias, training, momentum, eps))
        return torch.cat(made)

    return normed


if __name__ == "__main__":
    main()
