"""ServedOptimizer: the user's optimizer in a job whose servers update; its step pushes and pulls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from fleet.errors import CheckpointError, NotInitializedError, UnsupportedOptionError
from fleet.strategies._shared.optimizer_wrapper import (
    OptimizerWrapper,
    loss_of,
    users_step_hooks,
    without_step_hooks,
)

if TYPE_CHECKING:
    from fleet.ps.worker.trainer import Trainer

__all__ = ["SERVERS", "ServedOptimizer", "check_hooks"]

_MORE = itemgetter("momentum", "weight_decay", "maximize", "fused", "differentiable")  # they change SGD's numbers
_ZERO_GRAD = Optimizer.zero_grad
_OWN_CHECKS = "fleet.checks.raw_steps"  # its hook, which looks at steps past the session, changes nothing
_KNOWN_STEP: list[Any] = [None]  # the step() of torch.optim.SGD that was checked last
SERVERS = "parameter_servers"  # the entry of a state with the progress of this worker's pushes


class ServedOptimizer(OptimizerWrapper):
    """Hands gradients to the parameter servers; ``trainer`` is set by ``fleet.init_worker``.

    With ``hybrid`` the trainer steps the user's optimizer itself, on the mean of the workers' dense gradients, and the
    hooks of that optimizer run around that step.
    """

    def __init__(self, optimizer: Optimizer, *, hybrid: bool = False) -> None:
        super().__init__(optimizer)
        self.hybrid = hybrid
        self.trainer: Trainer | None = None
        self._loaded: dict[str, Any] | None = None

    def connect(self, trainer: Trainer) -> None:
        """Makes steps go to ``trainer``, which is not open yet."""
        # A state may be loaded before the servers are connected.
        if self._loaded is not None:
            trainer.load_state_dict(self._loaded)
        self.trainer = trainer

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Pushes the gradients of this step and pulls the parameters from the servers, as the mode says.

        Raises:
            NotInitializedError: before ``fleet.init_worker`` or after ``fleet.stop_worker``.
            PSError: a server is lost for longer than the deadline.
        """
        if self.trainer is None:
            raise NotInitializedError(
                "optimizer.step(): the parameter servers update, and they are not connected. Call fleet.init_worker() "
                "before training."
            )
        check_hooks(self.optimizer, self._trains_rows())  # they may have been added since
        loss = loss_of(closure)
        if self.hybrid:
            self.trainer.step()
        else:
            self._run_hooks("_optimizer_step_pre_hooks")
            self.trainer.step()
            self._run_hooks("_optimizer_step_post_hooks")
        self.note_step()
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A GradScaler that hears yes sets grad_scale before it steps.
        return self._trains_rows()

    @property
    def grad_scale(self) -> Any:
        """The scale that a GradScaler sets before it steps; beside rows it is refused."""
        raise AttributeError("grad_scale")

    @grad_scale.setter
    def grad_scale(self, value: Any) -> None:
        self.check_scaler()

    def check_scaler(self) -> None:
        """Raises UnsupportedOptionError where rows are trained: a GradScaler unscales parameters only."""
        if self._trains_rows():
            raise UnsupportedOptionError(
                "scaler.step(optimizer): a GradScaler unscales the gradients of parameters, and those of rows on the "
                "servers would arrive scaled. Compute in bfloat16, which needs no scaler "
                "(strategy.amp_configs = {'dtype': 'bfloat16'}), or make the scaler with enabled=False."
            )

    def _trains_rows(self) -> bool:
        return self.trainer is not None and any(part.group is not None for part in self.trainer.plan.sparse)

    def train_here(self) -> None:
        """Steps the user's optimizer on this worker's parameters (geo)."""
        optimizer: Any = self.optimizer
        if _is_plain_sgd(optimizer):
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for group in optimizer.param_groups:
                    trained = [p for p in group["params"] if p.grad is not None]
                    if trained:
                        torch._foreach_add_(trained, [p.grad for p in trained], alpha=-group["lr"])
            return
        with without_step_hooks(optimizer):  # they run in step(), around the whole
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of parameters and rows."""
        optimizer = self.optimizer
        plain = type(optimizer).zero_grad is _ZERO_GRAD and "zero_grad" not in vars(optimizer)
        with torch._C.DisableTorchFunctionSubclass():  # a weight that stands for rows watches its uses
            if set_to_none and plain and not torch.autograd._profiler_enabled():  # the profiler shows torch's call
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=set_to_none)
        self.drop_row_gradients()

    def drop_row_gradients(self) -> None:
        """Drops the gradients of rows."""
        if self.trainer is not None:
            self.trainer.drop_gradients()

    def has_new_gradients(self) -> bool:
        """Returns whether rows have gradients that were not pushed."""
        return self.trainer is not None and self.trainer.has_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups and the progress of this worker: after a restart no step is applied twice.

        The state of the rule (moments and the like) is on the servers; ``fleet.save_persistables`` saves it.
        """
        own = self._loaded or {} if self.trainer is None else self.trainer.state_dict()
        return {**super().state_dict(), SERVERS: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that :meth:`state_dict` returned.

        Raises:
            CheckpointError: it has moments of parameters, which are on the servers, or comes from elsewhere.
        """
        own = state_dict.get(SERVERS)
        if own is not None and not isinstance(own, dict):
            raise CheckpointError(f"the optimizer state has {own!r} under {SERVERS!r}; it is not one of this package.")
        kept = [
            key
            for key, values in state_dict.get("state", {}).items()
            if any(value is not None for value in values.values()) and values.get("step", 1)  # Adagrad begins with 0
        ]
        if kept and not self.hybrid:
            raise CheckpointError(
                f"the optimizer state has moments of {len(kept)} parameter(s), and in this mode the servers keep "
                "those: here they would be lost. Load a save of the servers with fleet.load_model() or "
                "fleet.init_server(dirname); of a local run load {**state, 'state': {}}."
            )
        super().load_state_dict({key: value for key, value in state_dict.items() if key != SERVERS})
        if own:
            self._loaded = own
            if self.trainer is not None:
                self.trainer.load_state_dict(own)

    def non_finite_rows(self) -> str:
        """Returns a sentence that names the first row whose gradient is not finite, for ``check_nan_inf``."""
        return "" if self.trainer is None else self.trainer.non_finite_rows()

    def _run_hooks(self, kind: str) -> None:
        for hook in list(getattr(self.optimizer, kind).values()):
            hook(self.optimizer, (self.optimizer,), {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "trainer": None}


def check_hooks(optimizer: Optimizer, trains_rows: bool) -> None:
    """Raises UnsupportedOptionError for hooks that would see the dense half of the gradients only."""
    if trains_rows and users_step_hooks(optimizer):
        raise UnsupportedOptionError(
            "distributed_optimizer(): the optimizer changes gradients before its step (grad_clip, L1Decay or a hook), "
            "and the gradients of rows on the servers would be missed. Remove it, or use nn.Embedding(sparse=False)."
        )


def _is_plain_sgd(optimizer: Any) -> bool:
    """Returns whether a step adds ``-lr * grad`` to each parameter, and only the optimizer's hooks run around it."""
    global_hooks = (
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    )
    return (
        type(optimizer) is torch.optim.SGD
        and "step" not in vars(optimizer)  # of a scheduler, or of the script
        and _is_torchs(torch.optim.SGD.step)
        and all(hook.__module__ == _OWN_CHECKS for hook in global_hooks)
        and not torch.autograd._profiler_enabled()
        and all(type(group["lr"]) is float and not any(_MORE(group)) for group in optimizer.param_groups)
    )


def _is_torchs(step: Any) -> bool:
    """Returns whether ``step`` of SGD is torch's own, which torch wraps when the first optimizer is made."""
    if _KNOWN_STEP[-1] is not step:
        inner = step
        files = (inspect.getfile(torch.optim.SGD), torch_optimizer.__file__)
        while inner is not None:
            if getattr(getattr(inner, "__code__", None), "co_filename", None) not in files:
                return False
            inner = getattr(inner, "__wrapped__", None)
        _KNOWN_STEP[-1] = step
    return True
