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

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fleet.env import Environment
from fleet.errors import ConfigError, NanInfError
from fleet.strategies._declare.fields import Values
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies._shared.alarm import Alarm
from fleet.strategies._shared.casts import scales_gradients
from fleet.strategies._shared.finite import Place, Sightings, described, tensors_in
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, followed_by

if TYPE_CHECKING:
    from fleet.job.job import Job

FLAGS = ("FLAGS_check_nan_inf", "FLAGS_pp_check_naninf")
_NEVER = 2**62
_MOST_SIGHTINGS = 10_000  # of forward passes that no step() follows


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
