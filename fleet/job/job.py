"""Job: the workers, and the models and optimizers that they train. It is passed down; nothing else keeps this state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fleet.common.log import LOGGER
from fleet.job.job_workers import Workers, never
from fleet.job.util import UtilBase
from fleet.job.wrapped_model import WrappedModel
from fleet.role_maker.record import RoleRecord

if TYPE_CHECKING:
    from fleet.strategies._declare.fields import Values


@dataclass(eq=False, kw_only=True)
class Job(Workers):
    """One job as this worker sees it.

    Attributes:
        options: the options of the plan.
        say: tells the user a line.
        optimizers: the wrapped optimizers, to which the session adds.
        strategies: the strategies of the plan.
        updating: steps under way; a closure may step another optimizer.
        is_between_served_steps: returns whether servers hold the parameters, and no step towards them is under way.
        util: collective operations on host arrays.
    """

    options: Values
    say: Callable[[str], None]
    optimizers: Sequence[Any] = ()
    strategies: Sequence[Any] = ()
    updating: int = 0
    is_between_served_steps: Callable[[], bool] = never
    util: UtilBase = field(init=False)

    def __post_init__(self) -> None:
        self.util = UtilBase(self)

    @classmethod
    def alone(cls, models: Sequence[WrappedModel] = ()) -> Job:
        """Returns the job of ``models``, or of an optimizer, outside of one, as ``torch.load`` and copies make them."""
        options = cast("Values", {})
        return cls(record=RoleRecord(), device=torch.device("cpu"), options=options, say=LOGGER.info, models=models)

    def before_save(self) -> None:
        """Tells the listeners that a state is about to be returned."""
        for listener in self.listeners.hearing["before_save"]:
            listener.before_save()

    @property
    def model(self) -> nn.Module | None:
        """The user's module that was wrapped last, or ``None``."""
        return self.models[-1].module if self.models else None

    def parameter_names(self) -> dict[Tensor, str]:
        """Returns the qualified name of every parameter of the wrapped models."""
        return {p: name for model in self.models for name, p in model.named_parameters()}

    def parameters(self) -> Iterator[Tensor]:
        """Returns the parameters of all wrapped models."""
        return (parameter for model in self.models for parameter in model.parameters())

    def parameter_sets(self) -> Iterator[Sequence[Tensor]]:
        """Yields the lists of parameters that every worker has: each model's, each optimizer's, each group's."""
        for model in self.models:
            yield list(model.parameters())
        for optimizer in self.optimizers:
            groups = [group["params"] for group in optimizer.param_groups]
            yield [parameter for group in groups for parameter in group]
            yield from groups

    def has_equal_gradients(self, parameters: Iterable[Tensor]) -> bool:
        """Returns whether data parallel gives every worker the same gradients for all ``parameters``."""
        exchanged = {p for model in self.models for p in model.exchanged_parameters()}
        return all(p in exchanged for p in parameters if p.requires_grad)
