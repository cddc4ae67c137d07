"""Listener: hears of a job's steps, at the points that fleet/job/README.md lists in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fleet.job.wrapped_model import WrappedModel
    from fleet.strategies._declare.fields import Values

Kind = TypeVar("Kind", bound="Listener")


class Listener:
    """Overrides the hooks that it wants to hear; an error that a hook raises reaches the script.

    Attributes:
        sleeps: whether it hears nothing of steps for now; :meth:`Listeners.wake` and :meth:`Listeners.put_to_sleep`
            change it.

    Example:
        >>> class Updates(Listener):
        ...     count = 0
        ...
        ...     def after_step(self, step):
        ...         self.count = step
    """

    sleeps = False

    # ---- models and optimizers --------------------------------------------------------------------------------------

    def options_asked(self, call: str, options: Values) -> None:
        """Hears that ``call`` asks for ``options``; every worker makes the call."""

    def options_chosen(self, options: Values) -> None:
        """Hears that the job takes ``options`` in place of those that it still has."""

    def before_wrap(self, module: nn.Module) -> None:
        """Hears that ``module`` is about to be wrapped; strategies have found no fault in it."""

    def model_wrapped(self, model: WrappedModel) -> None:
        """Hears that ``model`` was wrapped, or wrapped again for other options."""

    def optimizer_unwrapped(self, optimizer: Optimizer) -> None:
        """Hears that the user's ``optimizer`` is about to be wrapped, perhaps again."""

    def optimizer_wrapped(self, optimizer: Optimizer, user_optimizer: Optimizer) -> None:
        """Hears that ``optimizer`` was put around ``user_optimizer``."""

    def structure_changed(self, model: WrappedModel, added: Mapping[str, nn.Parameter]) -> None:
        """Hears, before a forward, that parameters of ``model`` were ``added``, removed, frozen or unfrozen."""

    # ---- a step -----------------------------------------------------------------------------------------------------

    def before_forward(self, model: WrappedModel) -> None:
        """Hears that ``model`` was called."""

    def rows_given(self, model: WrappedModel, data: Any, call: str) -> None:
        """Hears that ``call`` of a pipeline was given the whole batch ``data``."""

    def forward_begins(self, model: WrappedModel, inputs: Any) -> None:
        """Hears that ``model`` runs with ``inputs``; no listener has raised in :meth:`before_forward`."""

    def forward_ends(self) -> None:
        """Hears that a model has run, or has failed."""

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Hears that ``optimizer`` is about to step; with a closure the forward and backward passes are yet to come."""

    def after_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Hears that ``optimizer`` has run without an error; the step is not counted yet."""

    def after_step(self, step: int) -> None:
        """Hears that ``step`` steps are finished."""

    def gradients_arrived(self, model: WrappedModel) -> None:
        """Hears that a backward pass has brought every gradient of ``model``; an exchange of them may still run."""

    def exchange_ended(self, model: WrappedModel) -> None:
        """Hears that the gradients of ``model`` are those of all workers."""

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        """Hears that the gradients of ``parameters`` were cleared through their model."""

    def optimizer_cleared(self, optimizer: Optimizer) -> None:
        """Hears that ``optimizer`` has cleared the gradients of its parameters."""

    def batch_given(self, batches: Any, batch: Any) -> None:
        """Hears that ``batches``, torch's iterator over a DataLoader, is about to return ``batch``."""

    def next_batch(self) -> None:
        """Hears that a loop asks for its next batch; due checkpoints are written."""

    def state_loaded(self, target: WrappedModel | Optimizer) -> None:
        """Hears that ``target``, a wrapped model or optimizer, has loaded a state."""

    # ---- the job ----------------------------------------------------------------------------------------------------

    def beat(self, pause: bool) -> None:
        """Hears that this worker is alive, and with ``pause`` that it may be silent until the next step."""

    def workers_meet(self, call: str) -> None:
        """Hears that this worker waits now until every worker has made ``call``."""

    def before_save(self) -> None:
        """Hears that a state is about to be returned."""

    def before_join(self) -> None:
        """Hears that workers may take different numbers of batches from now on."""

    def close(self) -> None:
        """Hears that the job is over."""


HOOKS = tuple(name for name, value in vars(Listener).items() if callable(value) and not name.startswith("_"))
_OF_STEPS = HOOKS[HOOKS.index("before_forward") : HOOKS.index("state_loaded")]


class Listeners:
    """The listeners of one job in the order in which they were added.

    Attributes:
        hearing: by hook, the listeners that override it and do not sleep, so that a step calls no empty hooks.
    """

    def __init__(self) -> None:
        self._all: list[Listener] = []
        self.hearing: dict[str, tuple[Listener, ...]] = dict.fromkeys(HOOKS, ())

    def __contains__(self, listener: object) -> bool:
        return any(known is listener for known in self._all)

    def add(self, listener: Listener) -> None:
        """Adds ``listener``, which hears each point after those that were added before it."""
        self._all.append(listener)
        self._sort()

    def remove(self, listener: Listener) -> None:
        """Lets ``listener`` hear nothing more; does nothing where it has heard nothing."""
        self._all = [known for known in self._all if known is not listener]
        self._sort()

    def tell(self, hook: str, *told: Any) -> None:
        """Calls ``hook`` of every listener that hears it, in order; an error ends the round."""
        for listener in self.hearing[hook]:
            getattr(listener, hook)(*told)

    def wake(self, listener: Listener) -> None:
        """Lets ``listener`` hear of steps from now on."""
        listener.sleeps = False
        self._sort()

    def put_to_sleep(self, listener: Listener) -> None:
        """Lets ``listener`` hear nothing of steps until :meth:`wake`; models, optimizers and the end reach it still."""
        listener.sleeps = True
        self._sort()

    def find(self, kind: type[Kind]) -> Kind | None:
        """Returns the listener of this class, or ``None``."""
        return next((listener for listener in self._all if isinstance(listener, kind)), None)

    def get(self, kind: type[Kind]) -> Kind:
        """Returns the listener of this class, which is there."""
        found = self.find(kind)
        assert found is not None, kind
        return found

    def _sort(self) -> None:
        for hook in HOOKS:
            plain = getattr(Listener, hook)
            awake = [one for one in self._all if not (one.sleeps and hook in _OF_STEPS)]
            self.hearing[hook] = tuple(one for one in awake if getattr(type(one), hook) is not plain)
