"""OptimizerWrapper: an optimizer around an optimizer, for strategies that change ``step()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

LR_SCALE = "fleet_lr_scale"  # the entry of a parameter group with the factor by which its learning rate was scaled


def _inside(name: str, meaning: str) -> Any:
    """Returns the attribute ``name`` of the optimizer inside, as a property."""

    def write(self: OptimizerWrapper, value: Any) -> None:
        setattr(self.optimizer, name, value)

    def delete(self: OptimizerWrapper) -> None:
        delattr(self.optimizer, name)

    return property(attrgetter(f"optimizer.{name}"), write, delete, meaning)


def loss_of(closure: Callable[[], float] | None) -> Any:
    """Returns the loss of the closure of a ``step()``, computed with gradients; ``None`` without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def followed_by(closure: Callable[[], float], act: Callable[[], None]) -> Callable[[], float]:
    """Returns a closure for ``step()`` that calls ``act`` after ``closure``, before the update."""

    def both() -> float:
        loss = closure()
        act()
        return loss

    return both


class OptimizerWrapper(Optimizer):
    """Forwards everything to the optimizer inside; a subclass overrides the calls that it changes.

    It is a ``torch.optim.Optimizer``, so learning-rate schedulers, gradient scalers and ``isinstance`` checks accept
    it. Parameter groups and state are the objects of the optimizer inside.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # Optimizer.__init__ would build new parameter groups and state.
        self.optimizer = optimizer

    param_groups: Any = _inside("param_groups", "The parameter groups of the optimizer inside.")
    state: Any = _inside("state", "The state of the optimizer inside.")
    defaults: Any = _inside("defaults", "The defaults of the optimizer inside.")
    grad_scale: Any = _inside("grad_scale", "The scale that a GradScaler has left in the gradients.")
    found_inf: Any = _inside("found_inf", "Whether a GradScaler has found an inf or nan.")

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A GradScaler asks. Yes only where amp waits in the chain: other wrappers know nothing of scaled gradients, so
        # the scaler unscales them itself, whatever the user's optimizer (fused, for one) could do.
        return isinstance(self.optimizer, OptimizerWrapper) and self.optimizer._step_supports_amp_scaling

    def check_scaler(self) -> None:
        """Raises UnsupportedOptionError where an explicit GradScaler cannot unscale all gradients of a step."""
        if isinstance(self.optimizer, OptimizerWrapper):
            self.optimizer.check_scaler()

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Steps the optimizer inside."""
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def exchange_missing(self) -> None:
        """Takes part in the exchange that a batch without a backward pass has left out."""
        if isinstance(self.optimizer, OptimizerWrapper):
            self.optimizer.exchange_missing()

    def has_new_gradients(self) -> bool:
        """Returns whether a strategy keeps gradients out of ``.grad`` that came since the last step."""
        return isinstance(self.optimizer, OptimizerWrapper) and self.optimizer.has_new_gradients()

    def merges(self) -> bool:
        """Returns whether an update takes the gradients of several steps."""
        return isinstance(self.optimizer, OptimizerWrapper) and self.optimizer.merges()

    def window_notes(self) -> dict[str, Tensor] | None:
        """Returns the numbers saved with the gradients of an open window of batches; ``None`` without a window."""
        inner = self.optimizer
        return inner.window_notes() if isinstance(inner, OptimizerWrapper) else None

    def only_counts(self) -> bool:
        """Returns whether the next ``step()`` ends a batch and updates nothing."""
        return isinstance(self.optimizer, OptimizerWrapper) and self.optimizer.only_counts()

    def saving_note(self) -> str | None:
        """Returns a note for a user who saves a checkpoint at this moment, or ``None``."""
        return self.optimizer.saving_note() if isinstance(self.optimizer, OptimizerWrapper) else None

    @property
    def trains_locally(self) -> bool:
        """Whether gradients stay on their worker, so that the workers' parameters differ."""
        return isinstance(self.optimizer, OptimizerWrapper) and self.optimizer.trains_locally

    @property
    def is_out_of_step(self) -> bool:
        """Whether the workers have gone apart since their last exchange, so that no agreed stop may happen here."""
        return isinstance(self.optimizer, OptimizerWrapper) and self.optimizer.is_out_of_step

    @property
    def has_own_state(self) -> bool:
        """Whether a checkpoint of this moment needs the state of every worker, because they differ."""
        inner = isinstance(self.optimizer, OptimizerWrapper) and self.optimizer.has_own_state
        return inner or self.is_out_of_step

    def note_step(self) -> None:
        """Lets a scheduler that was made on the optimizer inside know of a step that did not call it."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every parameter."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that :meth:`state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the optimizer inside."""
        self.optimizer.add_param_group(param_group)
        self.note_groups()

    def note_groups(self) -> None:
        """Called when the parameter groups have changed, also those of the user's optimizer past this one."""

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns every parameter of every group, in order."""
        return [p for group in self.param_groups for p in group["params"]]

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("optimizer")
        if inner is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(inner, name)

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler leaves its bound wrapper of step() on the instance; it cannot be pickled and is recreated.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


_Wrapper = TypeVar("_Wrapper", bound=OptimizerWrapper)


def wrapper_in(optimizer: Optimizer, kind: type[_Wrapper]) -> _Wrapper | None:
    """Returns the outermost wrapper of the class ``kind`` around the user's optimizer, or ``None``."""
    while isinstance(optimizer, OptimizerWrapper):
        if isinstance(optimizer, kind):
            return optimizer
        optimizer = optimizer.optimizer
    return None


def note_groups(optimizer: Optimizer) -> None:
    """Tells every wrapper around the user's optimizer that its parameter groups have changed."""
    while isinstance(optimizer, OptimizerWrapper):
        optimizer.note_groups()
        optimizer = optimizer.optimizer


def innermost(optimizer: Optimizer) -> Optimizer:
    """Returns the user's optimizer, inside all wrappers."""
    while isinstance(optimizer, OptimizerWrapper):
        optimizer = optimizer.optimizer
    return optimizer


def shared_by_two(option: str) -> str:
    """Returns why an optimizer whose parameters were given to a later one cannot step."""
    return (
        "step() was called on an optimizer whose parameters distributed_optimizer() was given again later, in another "
        f"optimizer. {option} keeps what it needs of a parameter for one of them: step the later one, or put all "
        "parameters into one optimizer."
    )


def users_step_hooks(optimizer: Optimizer) -> list[Any]:
    """Returns the hooks that run before ``optimizer.step()`` and may look at gradients."""
    return list(getattr(optimizer, "_optimizer_step_pre_hooks", {}).values())


@contextmanager
def step_hooks_around(optimizer: Optimizer) -> Iterator[None]:
    """Runs the step hooks of the user's optimizer around the context; its own ``step()`` inside runs none."""
    optimizer = innermost(optimizer)
    for hook in users_step_hooks(optimizer):
        hook(optimizer, (), {})
    with without_step_hooks(optimizer):
        yield
    for hook in list(optimizer._optimizer_step_post_hooks.values()):
        hook(optimizer, (), {})


@contextmanager
def without_step_hooks(optimizer: Any) -> Iterator[None]:
    """Takes the step hooks off ``optimizer`` inside the context, so that its ``step()`` does not run them again."""
    kinds = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    kept = [dict(hooks) for hooks in kinds]
    for hooks in kinds:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(kinds, kept, strict=True):
            hooks.update(own)


def _forward_hooks() -> None:
    """Makes the hook methods of Optimizer act on the optimizer inside, where step() really happens."""
    for name in (
        "register_step_pre_hook",
        "register_step_post_hook",
        "register_state_dict_pre_hook",
        "register_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ):

        def forward(self: OptimizerWrapper, *args: Any, _name: str = name, **kwargs: Any) -> Any:
            return getattr(self.optimizer, _name)(*args, **kwargs)

        setattr(OptimizerWrapper, name, forward)


_forward_hooks()
