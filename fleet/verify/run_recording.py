"""What one process writes down while it trains: modules, losses, gradients, updates, and where it waits."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from fleet.verify.bits.turn_recording import TurnRecords
from fleet.verify.draw_replay import Draws
from fleet.verify.engines.training_engine import EngineJob, TrainingEngine
from fleet.verify.gradient_causes import nodes_behind
from fleet.verify.loader_replay import ReplayedBatches
from fleet.verify.record_files import RecordFile
from fleet.verify.tensor_digest import (
    NO_MEMORY,
    content,
    has_running_statistics,
    is_finite,
    memory_of,
    rows_digest,
    values_of,
    whole_digest,
)
from fleet.verify.tensor_files import load_tensors, save_tensors
from fleet.verify.user_lines import user_site

_MOST_CALLS = 2000  # of modules, written down for one update
_MOST_WEIGHTS = 1 << 26  # that are kept for one process to begin with
_ROUNDING = 1e-6
_INPUTS_OF = 2  # updates; they say whether both runs had the same data, and each is the output of something else


class StopTraining(BaseException):
    """Raised when enough updates were made; not an Exception, so that ``except Exception`` lets it through."""


class Recording:
    """Keeps what happens between two updates, and writes it down after each.

    Args:
        record: where to write.
        batches, draws: told when training begins and when an update was made.
        steps: updates after which :class:`StopTraining` is raised.
        scheduled: what a schedule changes in each group, to train with instead, of update ``n`` of optimizer ``o``
            under ``"o/n"``.
        engines: the frameworks that the script may train with.
    """

    noise = 0.0  # relative change of each gradient before an update

    def __init__(
        self,
        record: RecordFile,
        batches: ReplayedBatches,
        draws: Draws,
        steps: int,
        scheduled: dict[str, list[dict[str, Any]]],
        engines: Sequence[TrainingEngine] = (),
    ) -> None:
        self.record = record
        self.batches = batches
        self.draws = draws
        self.steps = steps
        self.scheduled = scheduled
        self.engines = engines
        self.turns = TurnRecords()
        self.initial: Path | None = None  # folder of worker 0, with the weights to begin with
        self.is_first = True  # whether this is worker 0
        self.is_enough: Callable[[dict[str, Any]], bool] = lambda update: False  # whether nothing after it is asked
        self.roots: dict[int, tuple[nn.Module, str]] = {}
        self.names: dict[int, str] = {}
        self.parameters: dict[int, str] = {}
        self._aliases: dict[str, Tensor] = {}  # what an optimizer has in place of a parameter
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._updates: Counter[int] = Counter()
        self._frozen: dict[int, nn.Module] = {}  # kept, so that no other module gets the id of one
        self._stack: list[tuple[nn.Module, bool]] = []
        self._pending: list[dict[str, Any]] = []
        self._restore: list[tuple[dict[str, Any], str, Any]] = []
        self._covered: dict[str, set[str]] = {"with_gradient": set(), "held": set()}
        self._inside_step = 0
        self._stepping: list[Optimizer] = []  # whose steps have begun, the outermost first
        self._inside_collective = False
        self._parts: bool | None = None  # whether models are divided; None until the job was described
        self.current: dict[str, Any] = _empty()
        self._idle: dict[int, tuple[nn.Module, list[str]]] = {}  # called in evaluation mode, with their dropout
        self._awake: set[str] = set()  # dropout of what was called in training mode since the last update
        self._wrapped: set[int] = set()  # parameters that a pass through a wrapper has reached
        self._entered: set[str] = set()  # models that were trained since the last update

    # ---- modules -------------------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Notes that ``module`` is called."""
        self.draws.place_unseen(self._stack[-1][0] if self._stack else None, self.names)
        counts = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1 and not self._inside_step
        counts = counts and not is_fx_symbolic_tracing()  # torch.fx looks at a model, and trains nothing
        if counts and not any(noted for _, noted in self._stack):
            counts = self._enter_root(module)
            if counts:
                self._note_line("forward")
                self._note_way(module)
        elif not torch.is_grad_enabled() and not self._stack and not self._inside_step:
            self.batches.evaluated()
            self._note_frozen(module)
        self._stack.append((module, counts))

    def _note_way(self, module: nn.Module) -> None:
        """Keeps the line of a pass around the wrapper that parameters of ``module`` were called through before."""
        held = {id(parameter) for parameter in module.parameters()}
        if any(self._is_wrapper(outer) for outer, _ in self._stack):
            self._wrapped |= held
        elif held & self._wrapped:
            self._note_line("around")

    def _enter_root(self, module: nn.Module) -> bool:
        """Begins a pass of training through a model; False for wrappers, losses and models without parameters."""
        if id(module) in self.names or self._is_wrapper(module):
            return id(module) in self.names
        if any(not self._is_wrapper(outer) for outer, _ in self._stack):
            return False
        if not any(p.requires_grad for p in module.parameters()):
            self._note_frozen(module)
            return not self._stack and any(True for _ in module.buffers())
        self._add_root(module)
        return True

    def _note_frozen(self, module: nn.Module) -> None:
        """Writes down what a module that nothing trains begins with: the workers must have its values alike."""
        if self._stack or id(module) in self._frozen or any(p.requires_grad for p in module.parameters()):
            return
        self._frozen[id(module)] = module
        values = {name: whole_digest(value) for name, value in values_of(module).items()}
        if values:
            alike = sum(type(one) is type(module) for one in self._frozen.values())
            self.record.write("start", model=f"frozen {type(module).__name__} {alike}", values=values, ties=[])

    def _is_wrapper(self, module: nn.Module) -> bool:
        """Returns whether ``module`` stands around a user's module, whose names count."""
        return any(engine.is_wrapper(module) for engine in self.engines)

    def _add_root(self, module: nn.Module) -> None:
        prefix = "" if not self.roots else f"model {len(self.roots) + 1}: "
        # What a model shares with one before is trained by now: the workers need not begin with it alike.
        known = {id(value) for root, _ in self.roots.values() for value in values_of(root).values()}
        fresh = {name: value for name, value in values_of(module).items() if id(value) not in known}
        self.roots[id(module)] = (module, prefix)
        for name, one in module.named_modules():
            self.names.setdefault(id(one), f"{prefix}{name}")
        for name, parameter in module.named_parameters():
            self.parameters.setdefault(id(parameter), f"{prefix}{name}")
        self._describe_job(module)
        unfilled = [f"{prefix}{name}" for name, value in fresh.items() if not is_finite(value)]
        self._start_alike(fresh)
        by_id: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            by_id.setdefault(id(parameter), []).append(name)
        ties = [names for names in by_id.values() if len(names) > 1]
        values = {f"{prefix}{name}": whole_digest(value) for name, value in fresh.items()}
        self.record.write("start", model=prefix, values=values, ties=ties, unfilled=unfilled)

    def _describe_job(self, model: nn.Module | None) -> None:
        """Writes what this process is in the job, once."""
        if self._parts is None:
            known = [job for job in (engine.job(model) for engine in self.engines) if job is not None]
            job = known[0] if known else EngineJob()
            self._parts = job.parts
            self.record.write("job", **asdict(job))

    def _start_alike(self, values: dict[str, Tensor]) -> None:
        """Keeps the whole ``values`` that a model begins with on worker 0; one process begins with those.

        No seed gives one process the weights of a layer that each worker draws a part of, nor those of a model that is
        made after draws whose number depends on the workers.
        """
        name = f"initial{len(self.roots)}.npz"
        if self.initial is not None:
            known = load_tensors(self.initial / name) if (self.initial / name).exists() else {}
            with torch.no_grad():
                for key, value in values.items():
                    if key in known and known[key].shape == value.shape:
                        (value.to_local() if isinstance(value, DTensor) else value).copy_(known[key])
            return
        self._inside_step += 1
        states = [state for state in (engine.initial_state() for engine in self.engines) if state is not None]
        if not states and not self._parts and sum(value.numel() for value in values.values()) < _MOST_WEIGHTS:
            states = [
                {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in values.items()}
            ]
        if self.is_first and states:
            save_tensors(self.record.folder / name, states[0])
        self._inside_step -= 1

    def after_forward(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Writes down what went in and came out, where training passes through ``module``."""
        if not self._stack or self._stack[-1][0] is not module:
            return
        self.draws.place_unseen(module, self.names, ended=True)
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
            # Whole numbers that come out may be places in the batch, as those of a packed sequence.
            floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            outs = [rows_digest(leaf) for leaf in floats]
            calls.append({"module": name, "type": type(module).__name__, "ins": ins, "outs": outs})
        self.turns.note_call(name, type(module).__name__, inputs, output)

    def training(self, module: nn.Module) -> None:
        """Notes that a model was trained with the batches that were given last."""
        self.batches.trained()
        modes = self.current["modes"]
        self._note_dropout(module)
        for one in module.modules():
            if has_running_statistics(one):
                modes[self.names.get(id(one), "")] = one.training

    def _note_dropout(self, called: nn.Module) -> None:
        """Notes the dropout of a model, or of a part of one that is called by itself, and the mode of this pass."""
        found = [self.names.get(id(one), "") for one in called.modules() if isinstance(one, _DropoutNd) and one.p > 0]
        if called.training:
            self._awake.update(found)
        elif found:
            self._idle[id(called)] = (called, found)

    def entry_buffers(self, module: nn.Module) -> None:
        """Writes down the buffers that a model's first pass of training starts with.

        Its own wrapper has sent worker 0's by now; that of another model does so when its pass begins.
        """
        root = self.roots.get(id(module))
        if root is not None and root[1] not in self._entered:
            self._entered.add(root[1])
            self.current["entry"] |= self._buffers([root])

    def _note_line(self, what: str) -> None:
        """Keeps the user's line that does ``what`` in this update; the first one counts."""
        self.draws.place_unseen(None)
        lines = self.current["lines"]
        if what not in lines:
            lines[what] = user_site()

    def _buffers(self, roots: Iterable[tuple[nn.Module, str]] | None = None) -> dict[str, Any]:
        """Returns digests of the buffers of the models ``roots``; None: of all."""
        found = {}
        for module, prefix in self.roots.values() if roots is None else roots:
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and not buffer.is_meta:
                    found[f"{prefix}{name}"] = self.turns.digest(buffer)
        return found

    # ---- backward ------------------------------------------------------------------------------------------------

    def around_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns torch's backward, which then also writes down losses and gradients."""

        def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            nested = torch._C._current_graph_task_id() != -1
            if not nested:
                self._note_line("backward")
                self.batches.trained()
                losses = [t for t in tree_leaves(tensors) if isinstance(t, Tensor)]
                numbers = [float(t.detach()) for t in losses if t.numel() == 1]
                self.current["losses"] += numbers
                self.turns.note_losses(numbers)
                self.current["nodes"] = nodes_behind(losses)
            result = backward(tensors, *args, **kwargs)  # hands on
            if not nested:
                self.current["backwards"] += 1
                self.current["back"] = self._gradients()
            return result

        return run

    def turn_begins(self, number: int, rank: int) -> None:
        """Notes that the turn of logical worker ``rank`` begins in round ``number``."""
        self.turns.begin(number, rank, len(self.draws.own))

    def around_losses(self, losses: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a pipeline's losses, which are then the ones that count: its last stage alone computes them."""

        def run(step: Any) -> Any:
            found = losses(step)
            if step.trains:
                self.current["losses"].append(float(found[step.loss_index][0]))
            return found

        return run

    def around_batches(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a call that takes several batches, each of which a model is trained with afterwards."""
        return self.batches.around_batches(take)

    def around_loop(
        self, loop: Callable[..., Any], base: Callable[[Any], Any], is_last: Callable[[Any], bool], *, own_batches: bool
    ) -> Callable[..., Any]:
        """Returns ``__iter__`` of a loader around a DataLoader, which then tells what it gives to the loop."""
        return self.batches.around_loop(loop, base, is_last, own_batches=own_batches)

    def _gradients(self) -> dict[str, Any]:
        found = {}
        for module, _ in self.roots.values():
            for parameter in module.parameters():
                name = self.parameters.get(id(parameter))
                if name is not None and parameter.grad is not None and not parameter.grad.is_meta:
                    found[name] = self.turns.digest(parameter.grad)
        self._covered["with_gradient"].update(found)
        return found

    def note(self, text: str) -> None:
        """Writes down what the report is to say beside its verdict."""
        self.record.write("note", text=text)

    def exchanged(self) -> None:
        """Notes a batch norm that exchanges something within its pass: it takes the statistics of all workers."""
        module = self._stack[-1][0] if self._stack else None
        if module is not None and (isinstance(module, _BatchNorm) or has_running_statistics(module)):
            self.current["synced"] |= module.training

    @contextmanager
    def collective(self, name: str, given: Any = ()) -> Iterator[None]:
        """Writes down a call that every worker must make; calls that it makes itself are not.

        ``gathers`` says that rows which need gradients are in what it is ``given``.
        """
        outermost = not self._inside_collective
        self._inside_collective = True
        try:
            if outermost:
                rows = [one for one in tree_leaves(given) if isinstance(one, Tensor) and one.requires_grad]
                gathers = any(one.ndim > 1 for one in rows)
                self.record.write("collective", name=name, where=user_site(), gathers=gathers)
            yield
        finally:
            self._inside_collective = not outermost

    # ---- updates -------------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Notes an update, or returns a step's arguments with a closure that, once it has the gradients, notes it."""
        if any(one is optimizer for one in self._stepping):  # the step before ended with an error
            self._stepping.clear()
        self._stepping.append(optimizer)
        # An optimizer inside another one, as of ZeroRedundancyOptimizer, has done a part of the update when it ends.
        if len(self._stepping) > 1:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self.before_update(optimizer)
        noted = False

        def closed() -> Any:
            nonlocal noted
            result = closure()  # hands on
            if not noted:  # others look along a line, and make no update
                noted = True
                self.before_update(optimizer)
            return result

        return (args[0], closed, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Writes down the gradients of an update, and sets the learning rates and momenta it is to have."""
        self._note_line("step")
        number = self._numbers.setdefault(optimizer, len(self._updates))  # an id may be used again
        self._updates[number] += 1
        groups = optimizer.param_groups
        self._know_aliases([p for group in groups for p in group["params"]])
        held = {id(p) for group in groups for p in group["params"]}
        if self.noise:
            noisy = [parameter.grad for group in groups for parameter in group["params"] if parameter.grad is not None]
            _add_noise(noisy, self.noise, self._updates[number])
        wanted = {name for i, name in self.parameters.items() if i in held}
        gradients = self._gradients()
        aliased = {name: one.grad for name, one in self._aliases.items() if id(one) in held}
        gradients |= {name: self.turns.digest(grad) for name, grad in aliased.items() if grad is not None}
        if wanted:
            gradients = {name: value for name, value in gradients.items() if name in wanted}
        made = {"optimizer": number, "n": self._updates[number], "rates": [float(g.get("lr", 0.0)) for g in groups]}
        made["scheduled"] = [_scheduled(group) for group in groups]
        made["held"] = sorted(wanted)
        trained = [
            names
            for called, names in self._idle.values()
            if any(self.parameters.get(id(p)) in gradients for p in called.parameters())
        ]
        made["idle"] = [name for names in trained for name in names if name not in self._awake]
        self._pending.append({**made, "gradients": gradients, "kind_of": type(optimizer).__name__})
        scheduled = self.scheduled.get(f"{number}/{self._updates[number]}", [])
        for group, given in zip(groups, scheduled, strict=True) if len(scheduled) == len(groups) else ():
            for name in given.keys() & group.keys():
                before = group[name]
                value: Any = tuple(given[name]) if isinstance(given[name], list) else given[name]
                self._restore.append((group, name, before))
                group[name] = torch.full_like(before, value) if isinstance(before, Tensor) else value

    def _know_aliases(self, held: Sequence[Tensor]) -> None:
        """Gives a tensor that an optimizer has in place of a parameter, in the same memory, the parameter's name."""
        unknown = {memory_of(one): one for one in held if id(one) not in self.parameters}
        unknown.pop(NO_MEMORY, None)  # an empty shard, which many tensors have
        for parameter in (p for module, _ in self.roots.values() for p in module.parameters()) if unknown else ():
            alias = unknown.get(memory_of(parameter))
            name = self.parameters.get(id(parameter))
            if alias is not None and name is not None:
                self._aliases[name] = alias  # kept, so that no other tensor gets its id
                self.parameters[id(alias)] = name

    def after_update(self, optimizer: Optimizer, *_: Any) -> None:
        """Writes the update down, unless the wrapper around the optimizer has not finished it."""
        if any(one is optimizer for one in self._stepping):
            self._stepping.pop()
        if self._stepping:
            return
        for group, name, before in self._restore:
            group[name] = before
        self._restore.clear()
        if self._pending and not self._inside_step:
            self.finish_update()

    def around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of Fleet's optimizer, which then also writes its updates down."""

        def run(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside_step += 1
            try:
                result = step(optimizer, *args, **kwargs)  # hands on
            finally:
                self._inside_step -= 1
            if self._pending and not self._inside_step:
                self.finish_update()
            return result

        return run

    def finish_update(self) -> None:
        """Writes down what happened up to an update and the parameters after it; stops after enough of them."""
        pending = self._pending
        self._pending = []
        self._describe_job(None)
        held = {id(p) for one in self._live_optimizers() for group in one.param_groups for p in group["params"]}
        self._covered["held"] |= {name for i, name in self.parameters.items() if i in held}
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
            "turns": self.turns.take(),
            "unseen": self.draws.unseen,
            "generator": content(torch.get_rng_state()),
        }
        written = [{**one, **self.current, **shared} for one in pending]
        for one in written:
            self.record.write("update", **one)
        self.current = _empty()
        self._entered.clear()
        self._idle.clear()
        self._awake.clear()
        self.draws.next_window()
        counts = self._updates.values()
        over = [self.is_enough({"kind": "update", **one}) for one in written]
        if min(counts) >= self.steps or max(counts) >= 2 * self.steps or any(over):
            raise StopTraining

    def _parameters(self) -> dict[str, Any]:
        """Returns digests of all parameters; where they are divided, of the whole ones, on worker 0."""
        models = [module for module, _ in self.roots.values()]
        for whole in (engine.parameters(models) for engine in self.engines):
            if whole is not None:
                return {name: self.turns.digest(value) for name, value in whole.items()}
        named = [
            (f"{prefix}{name}", parameter)
            for module, prefix in self.roots.values()
            for name, parameter in module.named_parameters()
            if not parameter.is_meta
        ]
        # One that two models share has the name that it has in the first.
        return {name: self.turns.digest(one) for name, one in named if self.parameters.get(id(one), name) == name}

    def _states(self) -> dict[str, Any]:
        found = {}
        for optimizer in self._live_optimizers():
            for parameter, state in optimizer.state.items():
                name = self.parameters.get(id(parameter))
                for key, value in state.items() if name is not None and isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                        found[f"{name} {key}"] = self.turns.digest(value)
        return found

    def _live_optimizers(self) -> list[Optimizer]:
        return [optimizer for optimizer in (reference() for reference in self.optimizers) if optimizer is not None]

    def coverage(self) -> dict[str, list[str]]:
        """Returns the parameters that got gradients, and those that some optimizer had at an update."""
        return {what: sorted(names) for what, names in self._covered.items()}

    def counts(self) -> dict[str, int]:
        """Returns how many updates each optimizer made."""
        return {str(number): count for number, count in self._updates.items()}


def _scheduled(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of a group that torch's schedulers change, as numbers and lists of numbers."""
    found: dict[str, Any] = {}
    for name in ("lr", "momentum", "betas"):
        value: Any = group.get(name)
        parts: Any = value if isinstance(value, tuple | list) else [value]
        if all(isinstance(part, int | float | Tensor) for part in parts):
            found[name] = list(map(float, parts)) if parts is value else float(parts[0])
    return found


@torch.no_grad()
def _add_noise(gradients: Sequence[Tensor], noise: float, update: int) -> None:
    """Adds normal random numbers to each gradient, whose norm is about ``noise`` times that of the gradient.

    It is at least 1e-6 times that of the largest: where large terms cancel, a rounding error is all that a gradient is.
    """
    # In one process the part of a DTensor is the whole.
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in gradients]
    dense = [one for one in parts if not one.is_sparse and not one.is_meta and one.numel()]
    norms = [float(one.float().norm()) for one in dense]
    least = min(noise, _ROUNDING) * max(norms, default=0.0)
    for i, (one, norm) in enumerate(zip(dense, norms, strict=True)):
        change = torch.randn(one.shape, generator=torch.Generator().manual_seed(1000 * update + i))
        one.add_((change * (max(noise * norm, least) / one.numel() ** 0.5)).to(one.dtype))


def _empty() -> dict[str, Any]:
    return {"forward": [], "modes": {}, "entry": {}, "losses": [], "nodes": [], "backwards": 0, "back": {},
            "synced": False, "lines": {}}  # fmt: skip
