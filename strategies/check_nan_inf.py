"""check_nan_inf: names the module, rank and step where a NaN or Inf first appears, and stops every worker.

The environment switches it on too: ``FLAGS_check_nan_inf=1``, or ``FLAGS_pp_check_naninf=1``, Fleet's flag for
pipelines.

[Note: When the host learns of it]
Each module's inputs and outputs, the gradients that flow into outputs, and the gradients of parameters are looked at on
the device, one reduction each, with no wait. Each ``step()`` then asks once, before anything is updated: the workers
agree by one number (all-reduce), so that all of them raise together, with the same message, and parameters and
optimizer state are still those of the last good step. A forward pass that records no gradients (evaluation) has no step
after it, and workers need not run equally many of them; there the worker asks after each forward, and rings an
:class:`Alarm` before it raises, because the others may already wait for it.

[Note: Scaled gradients]
With amp in float16, or with a GradScaler given to ``fleet.distributed_scaler``, the backward signal is scaled, and an
Inf in it is how the largest scale is found: that step is skipped. Gradients are then left to amp or the scaler, which
skips every update with an Inf or NaN, and only forward is checked.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fleet.common.own_thread import OwnThread
from fleet.env import Environment
from fleet.errors import ConfigError, NanInfError
from fleet.strategies._declare.fields import Values
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._shared.casts import scales_gradients
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, followed_by
from fleet.strategies._shared.parts import local

if TYPE_CHECKING:
    from fleet.job.job import Job

FLAGS = ("FLAGS_check_nan_inf", "FLAGS_pp_check_naninf")
_NEVER = 2**62
_MOST_SIGHTINGS = 10_000  # of forward passes that no step() follows
GRACE_S = 5.0
_PERIOD_S = 0.5
_HEARD_WITHIN_S = 3.0


class CheckNanInf(Strategy):
    """Looks at every module's outputs and gradients, and raises at the next ``step()``."""

    name = "check_nan_inf"
    meaning = "Stop all workers at the first NaN or Inf and name its module, rank and step; costs a wait in each step."
    stage = Stage.STEP
    steps_together = True
    # Outermost: it sees each of the user's calls of step(), before any other strategy acts on it.
    after = ("amp", "gradient_merge", "localsgd", "adaptive_localsgd")
    in_ps_job = True
    in_place = True
    conflicts = {"to_static": "a compiled model does not call its modules one by one, so none could be named"}
    model_effect = "looks at the inputs, outputs and gradients of every module for NaN and Inf"
    optimizer_effect = "raises NanInfError on every worker, before the update, when something was not finite"
    guide = Guide(
        when="The loss became NaN or Inf, and you want the first module, step and rank that produced one.",
        cost="One reduction over each output and each gradient, which reads it once; in each step one small all-reduce "
        "and one wait of the host for the device.",
        source="Fleet's FLAGS_check_nan_inf",
        example={"check_nan_inf": True},
    )

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether the option or one of the flags of the environment is on."""
        environment = Environment()
        return bool(options[cls.name]) or any(environment.bool(flag) for flag in FLAGS)

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that amp in float16 judges gradients itself."""
        if not scales_gradients(options, "cuda" if torch.cuda.is_available() else "cpu"):
            return ()
        return (
            "check_nan_inf looks at forward only: amp in float16 finds its loss scale by gradients that overflow, and "
            "skips those steps itself.",
        )

    def __init__(self, config: Any, job: Job) -> None:
        """Starts with nothing seen; listens to the other workers from the first model on."""
        super().__init__(config, job)
        self.watch = Watch(job)
        self._hooks: list[ModuleHooks] = []
        self._scaled = False
        self._root: nn.Module | None = None

    def prepare_model(self, model: nn.Module) -> None:
        """Remembers the module that has the user's names."""
        self._root = model

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``, whose modules are looked at in every pass."""
        self.watch.listen()
        scaled = self._scaled or scales_gradients(self.job.options, self.job.device.type)
        root = self._root if self._root is not None else model
        self._hooks.append(ModuleHooks(root, self.watch, gradients=not scaled))
        return model

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns an optimizer whose ``step()`` raises when something was not finite."""
        return CheckingOptimizer(optimizer, self.watch)

    def use_scaler(self, scaler: Any) -> None:
        """Leaves gradients to ``scaler``, as to amp: it skips the steps in which scaled gradients overflow."""
        for hooks in self._hooks:
            hooks.gradients = False
        self._scaled = True

    def close(self) -> None:
        """Removes the hooks and stops listening."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks.clear()
        self.watch.close()


class Watch:
    """The values that one worker has seen, and its messages to the others.

    ``steps`` counts the calls of ``step()``, over all optimizers.
    """

    def __init__(self, job: Job) -> None:
        self.sightings = Sightings()
        self.steps = 0
        self._job = job
        self._alarm: Alarm | None = None
        self._roots: list[nn.Module] = []

    def listen(self) -> None:
        """Listens to the other workers' alarm from now on."""
        if self._alarm is None and self._job.process_group is not None:
            self._alarm = Alarm(self._job.global_rank, self._job.world_size)

    def add_root(self, module: nn.Module) -> None:
        """Remembers ``module`` as a whole model, for the words of a message."""
        self._roots.append(module)

    def close(self) -> None:
        """Stops listening and forgets everything."""
        if self._alarm is not None:
            self._alarm.close()
        self._alarm = None
        self.sightings.clear()

    def heed(self) -> None:
        """Raises NanInfError when another worker has rung."""
        message = self._alarm.taken() if self._alarm is not None else None
        if message is not None:
            self.sightings.clear()
            rank = re.search(r"rank (\d+)", message)
            raise NanInfError(message, rank=int(rank[1]) if rank else -1, step=self.steps)

    def check_together(self) -> None:
        """Raises NanInfError on every worker when one of them has seen something; all call it at the same step."""
        self.heed()
        group = self._job.process_group
        if group is None or not self._job.collective:
            self.check_alone()
            return
        found = self.sightings.any_bad(self._job.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        if int(found) == 0:
            self.sightings.clear()
            return
        first = self.sightings.first()
        message = self._message(first) if first is not None else ""
        places = self._gathered(_NEVER if first is None else self._number(*first[:2]))
        self.sightings.clear()
        rank = min(range(len(places)), key=places.__getitem__)
        also = [other for other, place in enumerate(places) if place != _NEVER and other != rank]
        message = self._shared(message, rank)
        if also:
            message += f" Later in the same step: rank {', '.join(map(str, also))}."
        raise NanInfError(message, rank=rank, step=self.steps)

    def check_alone(self) -> None:
        """Raises NanInfError when this worker has seen something, after it told the others."""
        first = self.sightings.first()
        message = self._message(first) if first is not None else ""
        self.sightings.clear()
        if message:
            if self._alarm is not None:
                self._alarm.ring(message)
            raise NanInfError(message, rank=self._job.global_rank, step=self.steps)

    def _number(self, number: int, place: Place) -> int:
        """Returns a number that is the smallest on the worker with the earliest sighting in the computation.

        The same modules run on every worker that holds the same layers; between stages, a micro-batch goes forward
        through all of them before it goes back.
        """
        axes = self._job.axes
        stages = axes.size("pp")
        stage = axes.rank("pp")
        if stages == 1:
            return number
        turn = stages - 1 - stage if place.is_backward else stage
        return (((place.micro_batch * 2 + place.is_backward) * stages + turn) << 32) + number

    def _message(self, first: tuple[int, Place, str]) -> str:
        _, place, kind = first
        axes = self._job.axes
        is_root = any(place.module is root for root in self._roots)
        text = described(place, kind, is_root=is_root, stage=axes.rank("pp"))
        held = {"pp": f"pipeline stage {axes.rank('pp')}", "mp": f"mp rank {axes.rank('mp')}"}
        where = [words for axis, words in held.items() if axes.size(axis) > 1]
        if axes.size("pp") > 1:
            where.append(f"micro-batch {place.micro_batch}")
        at = f" ({', '.join(where)})" if where else ""
        return f"step {self.steps}, rank {self._job.global_rank}{at}: {text}"

    def _gathered(self, number: int) -> list[int]:
        mine = torch.tensor([number], dtype=torch.int64, device=self._job.device)
        all_numbers = [torch.empty_like(mine) for _ in range(self._job.world_size)]
        dist.all_gather(all_numbers, mine, group=self._job.process_group)
        return [int(tensor) for tensor in all_numbers]

    def _shared(self, message: str, rank: int) -> str:
        """Returns the message of ``rank`` on every worker."""
        group = self._job.process_group
        device = self._job.device
        if group is None:
            raise AssertionError("a message is shared among the workers of a group")
        source = dist.get_global_rank(group, rank)
        data = torch.tensor(list(message.encode()), dtype=torch.uint8, device=device)
        size = torch.tensor([len(data)], device=device)
        dist.broadcast(size, src=source, group=group)
        data = data if rank == dist.get_rank(group) else torch.empty(int(size), dtype=torch.uint8, device=device)
        dist.broadcast(data, src=source, group=group)
        return bytes(data.tolist()).decode()


class ModuleHooks:
    """The hooks on one model: every module's inputs and outputs, and with ``gradients`` the backward pass too."""

    def __init__(self, root: nn.Module, watch: Watch, *, gradients: bool) -> None:
        self.gradients = gradients
        self._watch = watch
        self._handles: list[RemovableHandle] = []
        self._parameters: list[tuple[str, nn.Parameter]] = list(root.named_parameters()) if gradients else []
        self._passes: Counter[int] = Counter()  # forward passes of each chunk of a pipeline stage since the last step
        self._step = self._micro_batch = self._in_backward = 0
        watch.add_root(root)
        self._handles.append(root.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
        for name, module in root.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(partial(self._after, name)))
        self._handles.append(root.register_forward_hook(self._end))

    def __deepcopy__(self, memo: Any) -> ModuleHooks:
        return self  # the modules of a copied model are looked at too

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigError(
            "torch.save(model): check_nan_inf watches the modules. Save model.state_dict(), or turn check_nan_inf off."
        )

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, module: nn.Module, inputs: Any, keywords: Any) -> None:
        self._watch.heed()
        if self._step != self._watch.steps:
            self._step = self._watch.steps
            self._passes.clear()
        # Each chunk of a pipeline stage sees every micro-batch once, so forwards are counted by chunk.
        chunk = keywords.get("chunk_id") or 0
        self._micro_batch = self._passes[chunk]
        self._passes[chunk] += 1
        if not self._parameters or not torch.is_grad_enabled():
            return
        # Parameters that were frozen until now get their hook here.
        with torch._C.DisableTorchFunctionSubclass():  # a weight that stands for rows takes no hooks of scripts
            for name, parameter in self._parameters:
                if parameter.requires_grad:
                    self._handles.append(parameter.register_hook(partial(self._gradient, Place("parameter", name))))
        self._parameters = [(name, parameter) for name, parameter in self._parameters if not parameter.requires_grad]

    def _before(self, name: str, module: nn.Module, inputs: Any, keywords: Any) -> None:
        for slot, tensor in tensors_in((inputs, keywords)):
            # Masks of attention hold -inf on purpose; where it does harm, an output shows it.
            is_given = tensor.is_floating_point() and not tensor.requires_grad
            shown = tensor.clamp(min=torch.finfo(tensor.dtype).min) if is_given else tensor
            self._look(tensor, Place("input", name, slot, module, self._micro_batch), shown)

    def _after(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for slot, tensor in tensors_in(outputs):
            is_new = self._look(tensor, Place("output", name, slot, module, self._micro_batch))
            if is_new and self.gradients and tensor.requires_grad and not tensor.is_leaf:
                place = Place("gradient", name, slot, module, self._micro_batch)
                tensor.register_hook(partial(self._gradient, place))

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        sightings = self._watch.sightings
        sightings.end_forward()
        if not torch.is_grad_enabled() or len(sightings) > _MOST_SIGHTINGS:
            self._watch.check_alone()

    def _look(self, tensor: Tensor, place: Place, shown: Tensor | None = None) -> bool:
        """Returns whether ``tensor`` is new, and looks at it, or at ``shown`` in its place."""
        if not self._watch.sightings.is_new(tensor):
            return False
        # Inside a backward pass these are values that are computed a second time.
        if torch._C._current_graph_task_id() == -1:
            self._watch.sightings.add(tensor if shown is None else shown, place)
        return True

    def _gradient(self, place: Place, gradient: Tensor) -> None:
        if place.kind == "gradient":
            self._in_backward = place.micro_batch
        if self.gradients:
            # A parameter does not know the micro-batch of its gradient: it is that of the latest gradient of an output.
            self._watch.sightings.add(gradient, replace(place, micro_batch=self._in_backward))


class CheckingOptimizer(OptimizerWrapper):
    """Asks before each update whether everything was finite; ``steps`` in the state counts the calls of ``step()``."""

    def __init__(self, optimizer: Optimizer, watch: Watch) -> None:
        super().__init__(optimizer)
        self._watch = watch

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Steps the optimizer inside; raises NanInfError, with nothing updated, when something was not finite."""
        self._watch.steps += 1
        if closure is None:
            self._check()
        # With a closure the passes run inside step(): the check comes after them and before the update.
        return super().step(None if closure is None else followed_by(closure, self._check))

    def _check(self) -> None:
        """Asks; where rows live on parameter servers the message names the row as well."""
        try:
            self._watch.check_together()
        except NanInfError as error:
            rows = getattr(self, "non_finite_rows", str)()
            if not rows:
                raise
            raise NanInfError(f"{error} Also {rows}", rank=error.rank, step=error.step) from None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside and the number of steps, which messages name."""
        return {**super().state_dict(), "check_nan_inf": {"steps": self._watch.steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state; a state that was saved without the option counts steps from 0."""
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "check_nan_inf"})
        self._watch.steps = int(state_dict.get("check_nan_inf", {"steps": 0})["steps"])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_watch": None}


class Alarm:
    """Stops all other workers, even those that wait in a collective operation that this worker will never join.

    A thread of every worker looks into the job's store twice a second. A worker that rings leaves its message there;
    the others print it and take it at their next :meth:`taken`; a worker that has not done so ``GRACE_S`` seconds later
    is blocked in an operation with the ringing worker, and ends with exit code 1.
    """

    def __init__(self, global_rank: int, world_size: int) -> None:
        """Starts listening; every worker makes one, and later alarms are separate ones."""
        # A separate connection: the main thread may block on the store's usual one.
        store = _get_default_store().clone()  # type: ignore[attr-defined]
        number = store.add(f"fleet/alarms/{global_rank}", 1)
        self._store = dist.PrefixStore(f"fleet/alarm/{number}", store)
        self._rank = global_rank
        self._others = world_size - 1
        self._stopped = threading.Event()
        self._taken = threading.Event()
        self._message: str | None = None
        self._thread = OwnThread(self._listen, name="fleet-alarm")
        self._thread.start()

    def ring(self, message: str) -> None:
        """Tells the other workers, and waits at most three seconds until they have heard it."""
        # The own thread stops first, or it would hear this message.
        self._stopped.set()
        self._thread.join()
        deadline = time.monotonic() + _HEARD_WITHIN_S
        try:
            self._store.set("message", message)
            while self._store.add("heard", 0) < self._others and time.monotonic() < deadline:
                time.sleep(0.05)
        except RuntimeError:
            return  # the store's server is gone, and with it the job

    def taken(self) -> str | None:
        """Returns the message of a worker that rang, or ``None``; with a message this worker ends by itself."""
        self._thread.check()
        if self._message is not None:
            self._taken.set()
        return self._message

    def close(self) -> None:
        """Stops listening."""
        self._stopped.set()
        self._taken.set()
        self._thread.join()

    def _listen(self) -> None:
        try:
            while not self._stopped.wait(_PERIOD_S):
                if self._store.check(["message"]):
                    self._message = self._store.get("message").decode()
                    self._store.add("heard", 1)
                    break
        except RuntimeError:
            return  # the store's server ended before this worker
        if self._message is None:
            return
        print(f"[rank {self._rank}] stops: {self._message}", file=sys.stderr, flush=True)
        if not self._taken.wait(GRACE_S) and threading.main_thread().is_alive():
            os._exit(1)


@dataclass(frozen=True, eq=False)
class Place:
    """Where a tensor was seen: ``kind`` is input, output, gradient or parameter; ``name`` is qualified.

    ``micro_batch`` counts the forward passes of the model since the last step.
    """

    kind: str
    name: str
    slot: int = 0
    module: nn.Module | None = None
    micro_batch: int = 0

    @property
    def is_backward(self) -> bool:
        """Whether it was seen in a backward pass."""
        return self.kind in ("gradient", "parameter")


class Sightings:
    """The tensors of the passes since the last :meth:`clear`, in the order in which they were computed.

    Looking at a tensor starts one reduction on its device (the largest absolute value, which a NaN survives) and does
    not wait for it. The host waits once, when :meth:`first` or :meth:`any_bad` is read.
    """

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._largest: list[Tensor] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def is_new(self, tensor: Tensor) -> bool:
        """Returns whether this value of ``tensor`` is asked about for the first time in this forward."""
        if tensor.is_inference():
            return True  # such tensors do not count their changes
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return False
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version)
        return True

    def end_forward(self) -> None:
        """Forgets which tensors were asked about; the values seen in them stay."""
        self._known.clear()

    @torch.no_grad()
    def add(self, tensor: Tensor, place: Place) -> None:
        """Looks at ``tensor``; without a floating type, or without entries, it is always finite."""
        values = local(tensor.detach())
        if values.is_sparse:
            values = values._values()
        if values.layout != torch.strided or not (values.is_floating_point() or values.is_complex()):
            return
        if values.numel() == 0 or values.element_size() == 1:  # vector_norm takes no 8-bit types
            return
        self._largest.append(torch.linalg.vector_norm(values, math.inf))
        self._places.append(place)

    @torch.no_grad()
    def any_bad(self, device: torch.device) -> Tensor:
        """Returns, on ``device`` and without waiting, 1 when something was not finite and 0 otherwise, shape [1]."""
        found = torch.zeros(1, dtype=torch.int32, device=device)
        for _, values in self._by_kind():
            found |= (~values.isfinite()).any().to(device=device, dtype=torch.int32)
        return found

    @torch.no_grad()
    def first(self) -> tuple[int, Place, str] | None:
        """Returns number, place and 'NaN' or 'Inf' of the first value that was not finite; waits for the device."""
        best: tuple[int, str] | None = None
        for places, values in self._by_kind():
            bad = [
                (place, value) for place, value in zip(places, values.tolist(), strict=True) if not math.isfinite(value)
            ]
            if bad and (best is None or bad[0][0] < best[0]):
                best = bad[0][0], "NaN" if math.isnan(bad[0][1]) else "Inf"
        return None if best is None else (best[0], self._places[best[0]], best[1])

    def clear(self) -> None:
        """Forgets everything."""
        self._places.clear()
        self._largest.clear()
        self._known.clear()

    def _by_kind(self) -> Iterator[tuple[list[int], Tensor]]:
        """Yields the values of one type and device, stacked, with their places in order."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, value in enumerate(self._largest):
            kinds.setdefault((value.dtype, value.device), []).append(place)
        for places in kinds.values():
            yield places, torch.stack([self._largest[place] for place in places])


def tensors_in(value: Any) -> list[tuple[int, Tensor]]:
    """Returns the tensors in nested tuples, lists and dictionaries, each with its place among all entries."""
    return [(slot, leaf) for slot, leaf in enumerate(tree_leaves(value)) if isinstance(leaf, Tensor)]


def described(place: Place, kind: str, *, is_root: bool, stage: int = 0) -> str:
    """Returns a sentence about the first value that was not finite.

    Args:
        place: where it was seen.
        kind: 'NaN' or 'Inf'.
        is_root: whether the module is the whole model, or all layers of a pipeline stage.
        stage: the number of that stage.
    """
    if place.kind == "parameter":
        return (
            f"{kind} first appears in the gradient of parameter {place.name!r}; the gradients that flow into the "
            "modules' outputs were finite up to there, and so was forward."
        )
    module = f"module {place.name!r} ({type(place.module).__name__})" if place.name else "the model"
    if place.kind == "gradient":
        return (
            f"{kind} first appears in backward, in the gradient that flows into output {place.slot} of {module}; "
            "forward was finite."
        )
    if place.kind == "input":
        came = "it came with the batch" if stage == 0 else f"it came from pipeline stage {stage - 1}"
        origin = came if is_root else f"it was computed between modules, before {module} was called"
        return f"{kind} first appears in input {place.slot} of {module}: {origin}."
    holds = non_finite_weight(place.module)
    cause = f"its {holds} holds one already" if holds else "its inputs and its own weights were finite"
    return f"{kind} first appears in forward, in output {place.slot} of {module}: {cause}."


@torch.no_grad()
def non_finite_weight(module: nn.Module | None) -> str | None:
    """Returns which parameter or buffer of ``module`` itself is not finite, in words, or ``None``."""
    if module is None:
        return None
    own = {**module._parameters, **module._buffers}
    for name, tensor in own.items():
        values = None if tensor is None else local(tensor)
        if values is not None and values.is_floating_point() and not bool(values.isfinite().all()):
            return f"{'parameter' if name in module._parameters else 'buffer'} {name!r}"
    return None
