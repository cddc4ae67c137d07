"""Hooks of the steps of a pipeline: Fleet's locations, and what runs there."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from fleet.errors import ConfigError
from fleet.strategies.pipeline.order import MicroStep

Hook = Callable[..., Any]
_ARGUMENTS = ("input_tensor", "output_tensor", "input_tensor_grad", "output_tensor_grad")


class PipelineParallelMicroStepLocations(Enum):
    """Where a hook runs: at the begin or the end of the forward or the backward of a micro-batch."""

    FORWARD_BEGIN = "forward_begin"
    FORWARD_END = "forward_end"
    BACKWARD_BEGIN = "backward_begin"
    BACKWARD_END = "backward_end"


_GLOBAL: dict[str, list[Hook]] = {}


def register_global_pipeline_parallel_hook(location: PipelineParallelMicroStepLocations, hook: Hook) -> None:
    """Runs ``hook`` at ``location`` of every pipeline of this process, see :meth:`PipelineModel.register_hook`."""
    _GLOBAL.setdefault(_checked(location), []).append(hook)


class StepHooks:
    """The hooks of one model."""

    def __init__(self) -> None:
        self._own: dict[str, list[Hook]] = {}
        self._after: dict[tuple[str, int], list[Hook]] = {}
        self._count = {"f": 0, "b": 0}

    @property
    def of_location(self) -> bool:
        """Whether a hook looks at tensors."""
        return bool(self._own) or bool(_GLOBAL)

    def add(self, location: PipelineParallelMicroStepLocations, hook: Hook) -> None:
        """Runs ``hook`` at ``location`` of each micro-batch."""
        self._own.setdefault(_checked(location), []).append(hook)

    def add_after(self, what: str, number: int, hook: Hook) -> None:
        """Runs ``hook(number)`` after the forward (``'f'``) or backward (``'b'``) of that number in a step."""
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ConfigError(f"location is {number!r}; it is the number of a micro-step, from 0.")
        self._after.setdefault((what, number), []).append(hook)

    def begin_step(self) -> None:
        """Counts micro-steps from 0 again."""
        self._count = {"f": 0, "b": 0}

    def run(self, location: str, action: MicroStep, tensors: dict[str, Any]) -> None:
        """Runs the hooks of ``location``."""
        hooks = [*_GLOBAL.get(location, ()), *self._own.get(location, ())]
        if hooks:
            given = {name: tensors.get(name) for name in _ARGUMENTS}
            for hook in hooks:
                hook(**given, step_id=action.micro)
        # Counted at the end of each, for these hooks run after the micro-step of their number.
        if location.endswith("end") and self._after:
            number = self._count[action.what]
            for hook in self._after.get((action.what, number), ()):
                hook(number)
        if location.endswith("end"):
            self._count[action.what] += 1


def _checked(location: Any) -> str:
    if not isinstance(location, PipelineParallelMicroStepLocations):
        raise ConfigError(
            f"register_hook({location!r}, ...): the location is a member of PipelineParallelMicroStepLocations: "
            f"{', '.join(place.name for place in PipelineParallelMicroStepLocations)}."
        )
    return str(location.value)
