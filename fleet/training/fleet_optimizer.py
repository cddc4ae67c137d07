"""FleetOptimizer: the result of ``fleet.distributed_optimizer``, a torch optimizer that also has Fleet's calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.checkpoint.state_dicts import OptimizerStates, warn_of_stage_or_part
from fleet.checkpoint.to_group import StateMesh
from fleet.errors import ConfigError, OptionWarning
from fleet.job.job import Job
from fleet.strategies._gradients.passes import forwards_behind
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, note_groups, wrapper_in
from fleet.strategies._shared.parts import PART, has_parts, warn_of_parts
from fleet.strategies.amp.amp_optimizer import AmpOptimizer
from fleet.training.fleet_model import FleetModel
from fleet.training.forward_guard import check_outside

# Stands in the place of the user's optimizer: `optimizer = fleet.distributed_optimizer(optimizer)` is right for an SGD.
UsersClass: Any = cast("Any", object)


class FleetOptimizer(OptimizerWrapper, UsersClass):  # type: ignore[misc]
    """Steps the optimizer inside, through the wrappers of the strategies.

    Everything in ``torch.optim.Optimizer`` works as before, and so do Fleet's calls: ``minimize``, ``clear_grad``,
    ``get_lr``, ``set_lr``, ``set_state_dict``.
    """

    def __init__(self, chain: Optimizer, job: Job, user_optimizer: Optimizer) -> None:
        super().__init__(chain)
        self.user_optimizer = user_optimizer
        self._job = job
        self._filled = False  # a gradient arrived since the last step or clear; tracked once minimize() has to know
        self._counted: dict[nn.Parameter, Any] = {}
        self._group_sizes = self._sizes()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates the parameters; strategies that count steps may only add up a batch."""
        job = self._job
        if job.logical is not None and self.only_counts():
            job.beat()
            return super().step(closure)  # the turn of a logical worker: no step of the job yet
        has_closure = closure is not None
        try:
            if any(model._redirected for model in job.models):
                check_outside(job.models, "optimizer.step()")
            self.follow_groups()
            if not has_closure:
                self.exchange_missing()  # workers inside backward() wait for it, and meet the others below
            for listener in job.listeners.hearing["before_step"]:
                listener.before_step(self, has_closure)
            # Counted, not a flag: a closure may step another optimizer of the job.
            job.updating += 1
            try:
                result = super().step(closure)
            finally:
                job.updating -= 1
            for listener in job.listeners.hearing["after_update"]:
                listener.after_update(self, has_closure)
        except RuntimeError as error:
            job.explain(error)
            raise
        self._filled = False
        job.num_steps += 1
        for listener in job.listeners.hearing["after_step"]:
            listener.after_step(job.num_steps)
        return result

    def follow_groups(self) -> None:
        """Tells the strategies of parameter groups that were added to the optimizer inside, past this one."""
        if self._group_sizes != (sizes := self._sizes()):
            self._group_sizes = sizes
            note_groups(self.optimizer)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    def minimize(
        self,
        loss: Tensor | list[Tensor],
        startup_program: object = None,
        parameter_list: Iterable[nn.Parameter] | None = None,
        no_grad_set: Iterable[nn.Parameter] | None = None,
    ) -> tuple[list[None], list[tuple[nn.Parameter, Tensor]]]:
        """Updates the parameters once with the gradients of ``loss``, and leaves the gradients in place.

        Fleet's eager loop calls ``loss.backward()`` first; the static form does not. Both work: when no backward pass
        from ``loss`` has reached the output of the model, this call clears the optimizer's gradients and runs
        ``loss.backward()``; otherwise it uses the existing gradients.

        Args:
            loss: the loss, or a list of losses that are added.
            startup_program: accepted for Fleet's signature; torch has no programs.
            parameter_list: restricts the update to these parameters.
            no_grad_set: excludes these parameters from the update.

        Returns:
            An empty list (Fleet's operators) and the pairs of parameter and gradient.

        Example:
            >>> loss.backward(); optimizer.minimize(loss); optimizer.clear_grad()
        """
        total = sum(loss[1:], loss[0]) if isinstance(loss, list | tuple) else loss
        if not isinstance(total, Tensor):
            raise ConfigError(f"minimize() takes the loss tensor, got {loss!r}.")
        only = None if parameter_list is None else {id(p) for p in parameter_list}
        never = set() if no_grad_set is None else {id(p) for p in no_grad_set}
        left_out = {p for p in self.parameters() if (only is not None and id(p) not in only) or id(p) in never}
        if left_out and self.merges():
            raise ConfigError(
                "minimize(parameter_list=..., no_grad_set=...) restricts one update, and here an update takes the "
                "gradients of several batches. Set requires_grad of the other parameters to False instead."
            )
        if total.requires_grad and not self._has_backward(total):
            self.zero_grad()
            total.backward()
        # Every torch rule skips a parameter without a gradient; the gradients come back, for minimize() leaves them.
        kept: list[tuple[nn.Parameter, Tensor]] = []
        pairs: list[tuple[nn.Parameter, Tensor]] = []
        for parameter in self.parameters():
            if parameter.grad is None:
                continue
            if parameter in left_out:
                kept.append((parameter, parameter.grad))
                parameter.grad = None
            else:
                pairs.append((parameter, parameter.grad))
        try:
            self.step()
        finally:
            for parameter, gradient in kept:
                parameter.grad = gradient
        return [], pairs

    def amp_init(
        self, place: object = None, scope: object = None, test_program: object = None, use_fp16_test: bool = False
    ) -> None:
        """Checks that mixed precision is ready; Fleet's scripts call it once after they initialise the model.

        There is nothing left to convert: ``distributed_model`` made the model compute in 16 bits, in evaluation too.

        Args:
            place: the device, as torch names it (``"cuda:0"``, a ``torch.device``), or ``None``.
            scope: accepted for Fleet's signature; torch has no scopes.
            test_program: accepted for Fleet's signature; torch has no programs.
            use_fp16_test: accepted; evaluation runs through the same model, and so in 16 bits.

        Raises:
            ConfigError: amp is off, or ``place`` is not the device of this worker.
        """
        amp = self._amp("amp_init")
        amp.check_place(place)
        if not amp.is_pure:
            warnings.warn(
                "optimizer.amp_init() has nothing to do: without amp_configs['use_pure_fp16'] or ['use_pure_bf16'] "
                "the parameters stay in float32, and autocast is already in place.",
                OptionWarning,
                stacklevel=2,
            )

    def get_loss_scaling(self) -> float:
        """Returns the loss scale in force, 1.0 where nothing is scaled; raises ConfigError when amp is off."""
        return float(self._amp("get_loss_scaling").get_loss_scaling())

    def _amp(self, call: str) -> AmpOptimizer:
        inner = wrapper_in(self.optimizer, AmpOptimizer)
        if inner is None:
            raise ConfigError(f"optimizer.{call}() needs mixed precision, and amp is off. Set strategy.amp = True.")
        return inner

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every parameter."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self._filled = False
        self._job.listeners.tell("optimizer_cleared", self)

    def clear_grad(self, set_to_zero: bool = False) -> None:
        """Clears the gradients: sets them to None, or with ``set_to_zero`` fills them with zeros."""
        self.zero_grad(set_to_none=not set_to_zero)

    clear_gradient = clear_gradients = clear_grad

    def get_lr(self) -> float:
        """Returns the first parameter group's learning rate, without the factor that Fleet's groups may have."""
        group = self.param_groups[0]
        return float(group["lr"]) / (group.get("lr_factor", 1.0) or 1.0)

    def set_lr(self, value: float) -> None:
        """Sets the learning rate of every parameter group, times the factor that a group in Fleet's form has.

        Raises ConfigError for a negative or non-number.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"set_lr() takes a number of at least 0, got {value!r}.")
        for group in self.param_groups:
            rate = float(value) * group.get("lr_factor", 1.0)
            # Captured and compiled steps read the rate from this tensor, so another one would change nothing there.
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; on a mesh that divides it, this worker's part, and a warning says so."""
        state = super().state_dict()
        states = self._states
        if states.is_part:
            warn_of_stage_or_part("optimizer")
            return states.marked(state)
        if PART in state or has_parts(state):
            warn_of_parts("optimizer")
        return state

    def full_state_dict(self, keep: bool = True) -> dict[str, Any]:
        """Returns the whole state on the host, which any number of workers can load; every worker must call it.

        A parameter has its place of one process; with a pipeline, its place among the parameters of all stages.

        Args:
            keep: False takes part in the gather and returns ``{}``.

        Raises:
            CheckpointError: the workers of one stage hold different entries, or an entry cannot be made whole.
        """
        state = super().state_dict()
        states = self._states
        if states.is_collective(state):
            self._job.meet("optimizer.full_state_dict()")
        return states.whole(state, keep)

    def local_state_dict(self) -> dict[str, Any]:
        """Returns this worker's part as plain tensors on the host; each worker saves its own."""
        return self._states.local(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a whole state, or the part that this worker saved; with a pipeline every worker must call it.

        Raises CheckpointError for the part of another worker.
        """
        states = self._states
        if states.is_collective_load(state_dict):
            self._job.meet("optimizer.load_state_dict()")
        super().load_state_dict(states.loaded(state_dict))
        for listener in self._job.listeners.hearing["state_loaded"]:
            listener.state_loaded(self)

    @property
    def is_part(self) -> bool:
        """Whether it updates only this worker's part of the model, apart from what sharding divides."""
        return self._states.is_part

    @property
    def _states(self) -> OptimizerStates:
        job = self._job
        return OptimizerStates(self, StateMesh(job.axes, job.device), cast("list[FleetModel]", job.models))

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state; entries that no optimizer state has ('epoch') are ignored."""
        known = {*super().state_dict(), PART}
        self.load_state_dict({name: value for name, value in state_dict.items() if name in known})

    set_dict = set_state_dict

    def _has_backward(self, loss: Tensor) -> bool:
        """Returns whether the user's loop ran backward for ``loss``; the same on all ranks that run the same script.

        Known from the wrapped models that computed ``loss``; without one, from the gradients of this process.
        """
        forwards = forwards_behind(loss)
        if not forwards:
            return self._has_gradients()
        if any(not made.differentiated for made in forwards):
            for made in forwards:
                made.differentiated = made.differentiated or "minimize"
            return False
        if all(made.differentiated == "minimize" for made in forwards):
            raise ConfigError(
                "minimize(loss) was called for a loss that another minimize() has already differentiated, and its "
                "graph is gone. Call loss.backward() once, then minimize(loss) of each optimizer."
            )
        return True

    def _has_gradients(self) -> bool:
        """Returns whether a gradient arrived since the last step or clear."""
        # Looked at once; from then on hooks count, for reading every gradient waits for the device.
        if not self._counted:
            self._filled = any(p.grad is not None and bool(p.grad.any()) for p in self.parameters())
        with torch._C.DisableTorchFunctionSubclass():  # a weight that stands for rows takes no hooks of scripts
            for parameter in self.parameters():
                if parameter.requires_grad and parameter not in self._counted:
                    self._counted[parameter] = parameter.register_post_accumulate_grad_hook(self._note_gradient)
        return self._filled or self.has_new_gradients()

    def _note_gradient(self, parameter: Tensor) -> None:
        self._filled = True

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_job"} | {"_counted": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_job": Job.alone(), **state})
