"""What one process writes down while it trains: modules, losses, gradients, updates, and where it waits."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace as tracing
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fleet.job.running import running_session
from fleet.training.fleet_model import FleetModel
from fleet.verify.draw_replay import Draws
from fleet.verify.loader_replay import ReplayedBatches
from fleet.verify.record_files import RecordFile
from fleet.verify.tensor_digest import content, rows_digest, whole_digest
from fleet.verify.tensor_files import load_tensors, save_tensors

_MOST_CALLS = 2000  # of modules, written down for one update
_INPUTS_OF = 2  # updates; they say whether both runs had the same data, and each is the output of something else
_MODEL_AXES = ("mp", "pp", "sep", "cp", "ep")


class StopTraining(BaseException):
    """Raised when enough updates were made; not an Exception, so that ``except Exception`` lets it through."""


class Recording:
    """Keeps what happens between two updates, and writes it down after each.

    Args:
        record: where to write.
        batches, draws: told when training begins and when an update was made.
        steps: updates after which :class:`StopTraining` is raised.
        rates: learning rates to train with instead, of update ``n`` of optimizer ``o`` under ``"o/n"``.
    """

    def __init__(
        self, record: RecordFile, batches: ReplayedBatches, draws: Draws, steps: int, rates: dict[str, list[float]]
    ) -> None:
        self.record, self.batches, self.draws, self.steps, self.rates = record, batches, draws, steps, rates
        self.initial: Path | None = None
        self.noise = 0.0  # relative change of each gradient before an update
        self.is_enough: Callable[[dict[str, Any]], bool] = lambda update: False  # whether nothing after it is asked
        self.roots: dict[int, tuple[nn.Module, str]] = {}
        self.names: dict[int, str] = {}
        self.parameters: dict[int, str] = {}
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self._numbers: dict[int, int] = {}
        self._updates: Counter[int] = Counter()
        self._stack: list[tuple[nn.Module, bool]] = []
        self._pending: list[dict[str, Any]] = []
        self._restore: list[tuple[dict[str, Any], Any]] = []
        self._with_gradient: set[str] = set()
        self._inside_step = 0
        self.in_loader = 0
        self._described = False
        self.current: dict[str, Any] = _empty()

    # ---- modules -------------------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Notes that ``module`` is called."""
        counts = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and not self._inside_step
        counts = counts and not tracing._is_fx_tracing_flag  # torch.fx looks at a model, and trains nothing
        if counts and not any(noted for _, noted in self._stack):
            counts = self._enter_root(module)
        elif not torch.is_grad_enabled() and not self._stack and not self._inside_step:
            self.batches.evaluated()
        self._stack.append((module, counts))

    def _enter_root(self, module: nn.Module) -> bool:
        """Begins a pass of training through a model; False for wrappers, losses and models without parameters."""
        if id(module) in self.names or _is_wrapper(module):
            return id(module) in self.names
        if any(not _is_wrapper(outer) for outer, _ in self._stack):
            return False
        if not any(p.requires_grad for p in module.parameters()):
            return not self._stack and any(True for _ in module.buffers())
        self._add_root(module)
        return True

    def _add_root(self, module: nn.Module) -> None:
        prefix = "" if not self.roots else f"model {len(self.roots) + 1}: "
        self.roots[id(module)] = (module, prefix)
        for name, one in module.named_modules():
            self.names.setdefault(id(one), f"{prefix}{name}")
        for name, parameter in module.named_parameters():
            self.parameters.setdefault(id(parameter), f"{prefix}{name}")
        self._describe_job()
        self._start_alike(module)
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        values = {f"{prefix}{name}": whole_digest(p) for name, p in module.named_parameters()}
        self.record.write("start", model=prefix, values=values, ties=[n for n in by_id.values() if len(n) > 1])

    def _describe_job(self) -> None:
        """Writes what this process is in the job, once."""
        if self._described:
            return
        self._described = True
        session = running_session()
        if session is None:
            self.record.write("job", data_rank=None, parts=False, notes=[], plan=[])
            return
        parts = session.job.collective and session.job.axes.size(*_MODEL_AXES) > 1
        self.record.write(
            "job",
            data_rank=session.job.data_rank,
            parts=bool(parts),
            notes=list(session.plan.notes),
            plan=[step.name for step in session.plan.steps],
        )

    def _start_alike(self, module: nn.Module) -> None:
        """Keeps the whole weights that divided ones begin with; one process begins with those.

        A layer that is divided draws its parts on each worker, so that no seed gives one process the same weights.
        """
        session = running_session()
        if self.initial is not None:
            if self.initial.exists():
                known = load_tensors(self.initial)
                with torch.no_grad():
                    for name, value in module.state_dict().items():
                        if name in known and known[name].shape == value.shape:
                            value.copy_(known[name])
        elif (
            session is not None
            and session.job.collective
            and session.job.axes.size("mp") > 1 == session.job.axes.size("pp")
        ):
            self._inside_step += 1
            state = session.models[0].full_state_dict(keep=session.job.global_rank == 0)
            self._inside_step -= 1
            plain = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            save_tensors(self.record.folder / "initial.npz", plain)

    def after_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Writes down what went in and came out, where training passes through ``module``."""
        if not self._stack or self._stack[-1][0] is not module:
            return
        _, counts = self._stack.pop()
        name = self.names.get(id(module))
        if not counts or name is None or not torch.is_grad_enabled():
            return
        if id(module) in self.roots or not any(noted for _, noted in self._stack):
            self.training(module)
        calls = self.current["forward"]
        if len(calls) < _MOST_CALLS:
            ins = []
            if self.draws.window < _INPUTS_OF:
                ins = [rows_digest(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
            outs = [rows_digest(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            calls.append({"module": name, "type": type(module).__name__, "ins": ins, "outs": outs})

    def training(self, module: nn.Module) -> None:
        """Notes that a model was trained with the batches that were given last."""
        self.batches.trained()
        modes = self.current["modes"]
        for one in module.modules():
            if isinstance(one, _BatchNorm) and one.track_running_stats:
                modes[self.names.get(id(one), "")] = one.training

    def entry_buffers(self, module: nn.Module) -> None:
        """Writes down the buffers that a pass of training starts with; the wrappers have sent worker 0's by now."""
        if not self.current["entry"]:
            self.current["entry"] = self._buffers()

    def _buffers(self) -> dict[str, Any]:
        found = {}
        for module, prefix in self.roots.values():
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and not buffer.is_meta:
                    found[f"{prefix}{name}"] = whole_digest(buffer)
        return found

    # ---- backward ------------------------------------------------------------------------------------------------

    def around_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns torch's backward, which then also writes down losses and gradients."""

        def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            nested = torch._C._current_graph_task_id() != -1
            if not nested:
                self.batches.trained()
                losses = [t for t in tree_leaves(tensors) if isinstance(t, Tensor)]
                self.current["losses"] += [float(t.detach()) for t in losses if t.numel() == 1]
                self.current["nodes"] = _nodes(losses)
            result = backward(tensors, *args, **kwargs)
            if not nested:
                self.current["backwards"] += 1
                self.current["back"] = self._gradients()
            return result

        return run

    def around_losses(self, losses: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a pipeline's losses, which are then the ones that count: its last stage alone computes them."""

        def run(step: Any) -> Any:
            found = losses(step)
            if step.trains:
                self.current["losses"].append(float(found[step.loss_index][0]))
            return found

        return run

    def _gradients(self) -> dict[str, Any]:
        found = {}
        for module, _ in self.roots.values():
            for parameter in module.parameters():
                name = self.parameters.get(id(parameter))
                if name is not None and parameter.grad is not None and not parameter.grad.is_meta:
                    found[name] = whole_digest(parameter.grad)
        self._with_gradient.update(found)
        return found

    # ---- updates -------------------------------------------------------------------------------------------------

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Writes down the gradients of an update, and sets the learning rates it is to have."""
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        self._updates[number] += 1
        groups = optimizer.param_groups
        held = {id(p) for group in groups for p in group["params"]}
        if self.noise:
            for i, parameter in enumerate(p for group in groups for p in group["params"] if p.grad is not None):
                _add_noise(parameter.grad, self.noise, 1000 * self._updates[number] + i)
        wanted = {name for i, name in self.parameters.items() if i in held}
        gradients = self._gradients()
        if wanted:
            gradients = {name: value for name, value in gradients.items() if name in wanted}
        made = {"optimizer": number, "n": self._updates[number], "rates": [float(g.get("lr", 0.0)) for g in groups]}
        self._pending.append({**made, "gradients": gradients, "kind_of": type(optimizer).__name__})
        rates = self.rates.get(f"{number}/{self._updates[number]}")
        if rates is not None and len(rates) == len(groups):
            for group, rate in zip(groups, rates, strict=True):
                self._restore.append((group, group["lr"]))
                group["lr"] = rate if not isinstance(group["lr"], Tensor) else torch.full_like(group["lr"], rate)

    def after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Writes the update down, unless the wrapper around the optimizer has not finished it."""
        for group, rate in self._restore:
            group["lr"] = rate
        self._restore.clear()
        if not self._inside_step:
            self.finish_update()

    def around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of Fleet's optimizer, which then also writes its updates down."""

        def run(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside_step += 1
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                self._inside_step -= 1
            if self._pending and not self._inside_step:
                self.finish_update()
            return result

        return run

    def finish_update(self) -> None:
        """Writes down what happened up to an update and the parameters after it; stops after enough of them."""
        pending, self._pending = self._pending, []
        self._inside_step += 1
        try:
            parameters = self._parameters()
        finally:
            self._inside_step -= 1
        shared = {
            "parameters": parameters,
            "buffers": self._buffers(),
            "states": self._states(),
            "draws": self.draws.own,
            "generator": content(torch.get_rng_state()),
        }
        written = [{**one, **self.current, **shared} for one in pending]
        for one in written:
            self.record.write("update", **one)
        self.current = _empty()
        self.draws.next_window()
        counts = self._updates.values()
        over = [self.is_enough({"kind": "update", **one}) for one in written]
        if min(counts) >= self.steps or max(counts) >= 2 * self.steps or any(over):
            raise StopTraining

    def _parameters(self) -> dict[str, Any]:
        """Returns digests of all parameters; where they are divided, of the whole ones, on worker 0."""
        session = running_session()
        if session is not None and session.job.collective and session.job.axes.size(*_MODEL_AXES) > 1:
            first = session.job.global_rank == 0
            states = [model.full_state_dict(keep=first) for model in session.models]
            return {
                name: whole_digest(value)
                for state in states
                for name, value in state.items()
                if isinstance(value, Tensor) and value.is_floating_point()
            }
        if not self.roots and session is not None:  # a pipeline runs its stages by itself
            return {n: whole_digest(p) for model in session.models for n, p in model.named_parameters()}
        return {
            f"{prefix}{name}": whole_digest(parameter)
            for module, prefix in self.roots.values()
            for name, parameter in module.named_parameters()
            if not parameter.is_meta
        }

    def _states(self) -> dict[str, Any]:
        found = {}
        for reference in self.optimizers:
            optimizer = reference()
            for parameter, state in getattr(optimizer, "state", {}).items() if optimizer is not None else ():
                name = self.parameters.get(id(parameter))
                for key, value in state.items() if name is not None and isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                        found[f"{name} {key}"] = whole_digest(value)
        return found

    def coverage(self) -> dict[str, list[str]]:
        """Returns the parameters that got gradients, and those that some optimizer has."""
        held: set[int] = set()
        for reference in self.optimizers:
            optimizer = reference()
            if optimizer is not None:
                held |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {
            "with_gradient": sorted(self._with_gradient),
            "held": sorted(name for i, name in self.parameters.items() if i in held),
        }

    def counts(self) -> dict[str, int]:
        """Returns how many updates each optimizer made."""
        return {str(number): count for number, count in self._updates.items()}


@torch.no_grad()
def _add_noise(tensor: Tensor, noise: float, seed: int) -> None:
    """Adds normal random numbers whose norm is about ``noise`` times that of ``tensor``."""
    if tensor.is_sparse or tensor.is_meta or not tensor.numel():
        return
    size = float(tensor.float().norm()) / tensor.numel() ** 0.5
    change = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    tensor.add_((change * (noise * size)).to(tensor.dtype))


def _is_wrapper(module: nn.Module) -> bool:
    """Returns whether ``module`` stands around a user's module, whose names count."""
    if isinstance(module, FleetModel | DistributedDataParallel):
        return True
    session = running_session()
    inner = [model.module for model in session.models] if session is not None else []
    if any(module is one for one in inner):
        return False
    held = {id(one) for one in module.modules()}
    return any(id(one) in held for one in inner)


def _empty() -> dict[str, Any]:
    return {"forward": [], "modes": {}, "entry": {}, "losses": [], "nodes": [], "backwards": 0, "back": {}}


def _nodes(losses: Sequence[Tensor]) -> list[str]:
    """Returns the last operations behind the losses, nearest first; a loss that adds up its samples says so."""
    found: list[str] = []
    waiting = [loss.grad_fn for loss in losses]
    while waiting and len(found) < 16:
        node = waiting.pop(0)
        if node is None:
            continue
        adds_up = getattr(node, "_saved_reduction", 1) == 2
        found.append(node.name() + (" sum" if adds_up else ""))
        waiting += [following for following, _ in node.next_functions]
    return found
