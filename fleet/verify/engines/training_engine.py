"""TrainingEngine: the questions of a comparison to the framework of a script, and the events that it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class UpdateListener(Protocol):
    """Hears of updates."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Hears of an update that is about to be made."""

    def after_update(self, optimizer: Optimizer) -> None:
        """Hears of an update that was made."""


class EngineListener(UpdateListener, Protocol):
    """Hears of an engine's own calls, which torch's hooks do not see."""

    def around_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step of an optimizer's wrapper, which makes no, one or several updates."""

    def around_losses(self, losses: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the losses of a pipeline's step."""

    def around_batches(self, take: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a call that takes several batches at once; a model is trained with each afterwards."""

    def around_loop(
        self, loop: Callable[..., Any], base: Callable[[Any], Any], is_last: Callable[[Any], bool], *, own_batches: bool
    ) -> Callable[..., Any]:
        """Returns ``__iter__`` of a loader around the DataLoader ``base(loader)``, whose batches then are the loop's.

        ``own_batches`` says that it gives batches of that DataLoader as they are. In one process the DataLoader inside
        gives what the workers had, joined. ``is_last(loader)`` says that the batch it has given is the last one.
        """

    def turn_begins(self, number: int, rank: int) -> None:
        """Hears that the turn of logical worker ``rank`` begins in round ``number`` of a reproducible job."""

    def note(self, text: str) -> None:
        """Hears a note for the report."""

    def collective(self, name: str, given: Any = ()) -> AbstractContextManager[None]:
        """Surrounds a call that every worker must make; ``given`` are its arguments."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run as its engines see it: whether it is the one process, and how many copies of the model the workers hold.

    ``strategy`` is the file of ``--strategy`` or ``""``; ``folder`` holds the record of this process.
    """

    alone: bool
    copies: int
    strategy: str
    folder: Path


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """The place of a process in the job of an engine.

    ``data_rank`` is the number of its copy of the model, None where it shares that with no other process; ``parts``
    says that it holds a part of one. ``plan`` has the options that are on, and ``computing`` those of them that one
    process must have too. ``seeded_by`` names the engine where it, and not the script, seeds all workers alike.
    ``logical`` is the number of logical workers that the processes host, 0 where there are none.
    """

    engine: str = ""
    data_rank: int | None = None
    parts: bool = False
    notes: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    computing: tuple[str, ...] = ()
    seeded_by: str = ""
    logical: int = 0


class TrainingEngine:
    """A framework that adds no call to torch; an adapter describes the calls that its framework adds.

    ``wrappers`` are the classes that stand around a user's model or optimizer, whose names and updates count.
    """

    wrappers: tuple[type, ...] = ()

    def install(self, listener: EngineListener, plan: RunPlan) -> None:
        """Makes the engine's own calls report to ``listener``; one process leaves out those that divide the work."""

    def is_wrapper(self, module: nn.Module) -> bool:
        """Returns whether ``module`` stands around a user's module."""
        return isinstance(module, self.wrappers)

    def job(self, model: nn.Module | None) -> EngineJob | None:
        """Returns the place of this process in the job that trains ``model``; None where the engine runs no job."""
        return None

    def parameters(self, models: list[nn.Module]) -> Mapping[str, Tensor] | None:
        """Returns whole parameters, where those of the ``models`` that were called are none or parts.

        Every worker calls this; worker 0 gets all of them.
        """
        return None

    def initial_state(self) -> Mapping[str, Tensor] | None:
        """Returns on worker 0 the whole weights that one process must begin with, where no seed gives it those."""
        return None
