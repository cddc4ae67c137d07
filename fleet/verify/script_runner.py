"""``python -m fleet.verify.script_runner``: runs a script as processes of a comparison.

Each line of its input is a plan in JSON: script, arguments, variables, folder for the record, steps, strategy file,
folders of the workers' records, learning rates and momenta (for the single process). A process that has torch is forked
for it.
"""

from __future__ import annotations

import ast
import faulthandler
import importlib
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
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
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

from fleet.common.plain_files import read_small
from fleet.env import export
from fleet.verify.changed_files import ChangedFiles
from fleet.verify.draw_replay import Draws, install_draws
from fleet.verify.engines.fleet_engine import watch_rule_steps
from fleet.verify.engines.late_imports import when_imported
from fleet.verify.engines.registry import ENGINES
from fleet.verify.engines.training_engine import RunPlan
from fleet.verify.generator_states import watch_reseeding
from fleet.verify.incomparable_runs import VERIFY_FOLDER, own_failure
from fleet.verify.loader_replay import ReplayedBatches, install_batches
from fleet.verify.number_findings import until_lost
from fleet.verify.record_files import RecordFile
from fleet.verify.run_recording import Recording, StopTraining
from fleet.verify.tried_script import UpdateCounter, confine, run_text
from fleet.verify.user_lines import is_library

_COLLECTIVES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "gather", "scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier", "all_gather_object", "gather_object",
    "broadcast_object_list", "monitored_barrier",
)  # fmt: skip
# What verify puts in place of a function hands the script's arguments on in a line that says so: errors there are the
# script's, as are those that verify raises itself.
_HANDED_ON = ("# hands on", "raise ")
_MOST_SOURCE = 1 << 24  # bytes of a script
_LARGE = ("accelerate", "lightning", "pytorch_lightning", "transformers")
_PARENT_AWAY_S = 600.0


def main() -> None:
    """Starts a process for each plan and prints its id; ends them when there are no more plans."""
    started: list[int] = []
    for line in sys.stdin:
        if not started:
            _import_ahead(json.loads(line))
        parent, process = os.getpid(), os.fork()
        if not process:
            _become(json.loads(line) | {"parent": parent})
        started.append(process)
        print(process, flush=True)
    for process in started:  # one that has ended is kept as a zombie until now, so that its id stays its own
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _import_ahead(plan: dict[str, Any]) -> None:
    """Imports what a script takes of large packages, once for all its processes; errors come when the script does."""
    with suppress(Exception):
        tree = ast.parse(plan["text"] or read_small(plan["script"], _MOST_SOURCE))
        found = [(one.module or "", one.names) for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
        found += [(name.name, []) for one in ast.walk(tree) if isinstance(one, ast.Import) for name in one.names]
        for module, names in found:
            if module.partition(".")[0] in _LARGE:
                package = importlib.import_module(module)
                for name in names:
                    getattr(package, name.name, None)


def _become(plan: dict[str, Any]) -> NoReturn:
    """Makes this process the one of ``plan``."""
    try:
        with open(plan["log"], "wb") as log, open(os.devnull, "rb") as nothing:
            for own, file in ((0, nothing), (1, log), (2, log)):
                os.dup2(file.fileno(), own)
        os.chdir(plan["place"])
        export(plan["environment"])
        _train(plan)
    except BaseException as error:  # the script's own ends in _run_script
        traceback.print_exc()
        if not plan["text"]:
            record = RecordFile(Path(plan["folder"]))
            record.write("end", how="failed", error=own_failure(error))
            record.close()
    os._exit(1)


def _train(plan: dict[str, Any]) -> NoReturn:
    """Runs the script of ``plan``, and ends this process when the others need it no more."""
    rank = plan["rank"]
    record = RecordFile(Path(plan["folder"]))
    stacks = (record.folder / "stacks.txt").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    if plan["text"]:
        _try(plan, record)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1000 + rank)
    sources = [Path(source) for source in plan["sources"]]
    alike = Path(plan["alike"]) if plan["alike"] else None
    draws = Draws(record.folder, sources, in_turn=plan["in_turn"], alike=alike)
    batches = ReplayedBatches(record, _Loading(draws), sources, in_turn=plan["in_turn"])
    engines = [made() for made in ENGINES]
    recording = Recording(record, batches, draws, plan["steps"], plan["scheduled"], engines)
    recording.initial = sources[0] if sources else None
    recording.is_first = rank == 0
    recording.noise = plan["noise"]
    if plan["beside"]:
        recording.is_enough = until_lost(Path(plan["beside"]))
    _install(recording, draws, batches, plan, alone=bool(sources))
    ChangedFiles(record.folder.parent, lambda: draws.window > 0, lambda text: record.write("note", text=text)).watch()
    started = time.perf_counter()
    how, error, _ = _run_script(plan)
    _end(
        plan, record, how=how, error=error, seconds=time.perf_counter() - started, unequal_draws=draws.unequal,
        own_numbers=draws.numbers, counts=recording.counts(), **recording.coverage(),
    )  # fmt: skip


def _try(plan: dict[str, Any], record: RecordFile) -> NoReturn:
    """Runs the text of ``plan`` until it has made its updates, and compares nothing."""
    counter = UpdateCounter(record, plan["steps"])
    register_optimizer_step_post_hook(counter.after_update)
    watch_rule_steps(counter)
    confine(record)
    how, error, lines = _run_script(plan)
    _end(plan, record, how=how, error=error, lines=lines)


def _end(plan: dict[str, Any], record: RecordFile, **values: Any) -> NoReturn:
    """Writes down how the script ended, and ends this process when the others need it no more."""
    record.write("end", **values)
    sys.stdout.flush()
    sys.stderr.flush()
    (record.folder / "done").touch()
    _wait_for_parent(plan)
    os._exit(0)


class _Loading:
    """Says whether a DataLoader is at work; the training loop begins with the first batch."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._begun = False

    def __call__(self, entered: bool) -> None:
        if not self._begun and self._draws.window == 0:
            self._draws.begin()
        self._begun = True
        self._draws.active = not entered


def _run_script(plan: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Returns how the script ended, the text of its error, and the user's lines that led there, innermost last."""
    script = plan["script"]
    sys.argv = [script, *plan["arguments"]]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        if plan["text"]:
            run_text(script, plan["text"])
        else:
            runpy.run_path(script, run_name="__main__")  # hands on
    except StopTraining:
        return "stopped", "", []
    except SystemExit as stop:
        return ("ended", "", []) if not stop.code else ("failed", f"SystemExit: {stop.code}", [])
    except BaseException as error:
        places = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        own = [place for place in places if not is_library(place.rpartition(":")[0])]
        traceback.print_exc()
        text = "" if plan["text"] else _own_failure(error)
        return "failed", f"{text or f'{type(error).__name__}: {error}'}\n@{own[-1] if own else ''}", own
    return "ended", "", []


def _own_failure(error: BaseException) -> str:
    """Returns what verify says of an error that it raised itself, or that follows one; "" where the script did."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        frames = traceback.extract_tb(following.__traceback__)
        is_ours = bool(frames) and frames[-1].filename.startswith(VERIFY_FOLDER)
        if is_ours and not any(call in str(frames[-1].line) for call in _HANDED_ON):
            return own_failure(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return ""


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
    watch_reseeding(lambda where: recording.record.write("reseeded", where=where))
    backward = recording.around_backward(torch.autograd.backward)
    torch.autograd.backward = backward
    register_module_forward_pre_hook(_before(recording))
    register_module_forward_hook(recording.after_forward, always_call=True)
    register_optimizer_step_pre_hook(recording.before_step)
    register_optimizer_step_post_hook(recording.after_update)
    _watch_optimizers(recording, draws)
    _watch_collectives(recording)
    if alone:
        functional.batch_norm = _in_parts(functional.batch_norm, plan, recording)
    folder = recording.record.folder
    facts = RunPlan(alone=alone, copies=plan["replicas"], strategy=plan["strategy"], folder=folder)
    for engine in recording.engines:
        engine.install(recording, facts)


def _before(recording: Recording) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.RNNBase) and module.dropout:
            module.dropout = 0.0  # its draws are made inside torch and cannot be replaced
            recording.record.write("note", text="dropout inside recurrent layers was off in both runs")
        recording.before_forward(module, inputs)
        if recording._stack[-1][1] and not any(noted for _, noted in recording._stack[:-1]):
            recording.entry_buffers(module)

    return before


def _watch_optimizers(recording: Recording, draws: Draws) -> None:
    build = Optimizer.__init__

    @wraps(build)
    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)  # hands on
        if not isinstance(self, tuple(kind for engine in recording.engines for kind in engine.wrappers)):
            recording.optimizers.append(weakref.ref(self))
            if not recording.roots and not recording.batches.has_begun:
                draws.begin()

    Optimizer.__init__ = built  # type: ignore[method-assign]


def _watch_collectives(recording: Recording) -> None:
    """Makes the calls of all workers tell that the script makes them, those whose gradients are exchanged as well."""

    def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            recording.exchanged()
            own = not is_library(sys._getframe(1).f_code.co_filename)
            if not own or kwargs.get("group") not in (None, dist.group.WORLD):
                return original(*args, **kwargs)  # hands on
            with recording.collective(f"torch.distributed.{name}", (args, kwargs)):
                return original(*args, **kwargs)  # hands on

        return run

    def watch(module: ModuleType, inside: str = "") -> None:
        for name in _COLLECTIVES:
            if hasattr(module, name):
                setattr(module, name, watched(f"{inside}{name}", getattr(module, name)))

    watch(dist)
    for name in ("torch.distributed.nn.functional", "torch.distributed.nn"):
        when_imported(name, partial(watch, inside="nn."))


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
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)  # hands on
        made = []
        for i, rows in enumerate(input.chunk(parts)):
            kept = (running_mean, running_var) if i == 0 else (None, None)
            made.append(original(rows, *kept, weight, bias, training, momentum, eps))  # hands on
        return torch.cat(made)

    return normed


if __name__ == "__main__":
    main()
