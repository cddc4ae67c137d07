"""StepTimes: how the time of a worker's steps divides into data, forward, backward, exchange, update and the rest.

[Note: Parts of a step]
A step ends where ``step()`` of an optimizer returns. The wrapped model and optimizer say where forwards, backward
passes and updates begin and end. The time between two such events belongs to the part that the later one shows: before
a forward the loop waited for data, between forward and backward it computed the loss, before an update it clipped. So
loops with accumulation, several models or optimizers, a GradScaler or closures need no settings.

With data parallel the exchange runs beside backward; ``exchange`` is the rest of it after the last gradient of this
worker. torch's reducer waits in a callback at the end of a backward pass, so one callback before it and one
behind it measure that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from fleet.job.wrapped_model import WrappedModel

PARTS = ("data", "forward", "backward", "exchange", "update", "other")


class StepTimes:
    """Nanoseconds of each part of the step under way; see [Note: Parts of a step].

    Attributes:
        parts: nanoseconds since the beginning, by name.
        spans: (part, begin, end) in nanoseconds since 1970; kept while it is a list.
        waits: called before the clock is read, to wait for a device; None does not wait.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self.parts = dict.fromkeys(PARTS, 0)
        self.spans: list[tuple[str, int, int]] | None = None
        self.waits: Callable[[], None] | None = None
        self._taken: dict[str, dict[str, int]] = {}
        self._clock = clock
        self._since = clock()
        self._was = "step"  # the part that ended last: step, forward or backward
        self._depth = 0  # of forwards inside forwards
        self._evaluates = self._in_backward = self._in_update = self._in_pipeline = False

    def take(self, reader: str = "profile") -> dict[str, int]:
        """Returns the parts since the last call with this ``reader``."""
        before = self._taken.get(reader)
        self._taken[reader] = now = self.parts.copy()
        return now if before is None else {part: ns - before[part] for part, ns in now.items()}

    @property
    def since(self) -> int:
        """When the part under way began."""
        return self._since

    def restart(self) -> None:
        """Leaves out the time since the last mark."""
        self.take()
        self._since = self._clock()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Counts what happens inside the context as ``other``, whatever surrounds it."""
        began = self._clock()
        try:
            yield
        finally:
            ns = self._clock() - began
            self.parts["other"] += ns
            self._since += ns

    def watch_model(self, model: WrappedModel) -> None:
        """Measures the backward passes of ``model``, and the micro-batches of a pipeline."""
        if not isinstance(getattr(type(model), "_hooks", None), property):
            if self._backward_starts not in model._passes.starts:
                model._passes.starts.append(self._backward_starts)
            return
        hooks = getattr(model, "_hooks")  # noqa: B009  (of a PipelineModel)
        self._in_pipeline = True
        # Here, because a job without a pipeline loads nothing of one.
        from fleet.strategies.pipeline.hooks import PipelineParallelMicroStepLocations as Locations

        hooks.add(Locations.FORWARD_BEGIN, lambda **_: self.forward_begins())
        hooks.add(Locations.FORWARD_END, lambda **_: self.forward_ends())
        hooks.add(Locations.BACKWARD_BEGIN, lambda **_: self._pass(self._gap()))
        hooks.add(Locations.BACKWARD_END, lambda **_: self._end("backward"))

    def forward_begins(self) -> None:
        """Called before a forward of a wrapped model."""
        self._depth += 1
        # A wrapped model inside a wrapped model: the outer forward covers it.
        if self._depth > 1:
            return
        self._in_backward = False  # a pass that failed has no end
        self._evaluates = not torch.is_grad_enabled()
        self._pass("other" if self._evaluates else self._gap())

    def forward_ends(self) -> None:
        """Called after it, also when it failed."""
        self._depth -= 1
        if self._depth == 0:
            if self._evaluates:
                self._pass("other")
            else:
                self._end("forward")

    def update_begins(self) -> None:
        """Called before a step of an optimizer."""
        self._in_backward = False
        self._in_update = True
        self._pass("exchange" if self._in_pipeline and self._was != "step" else "other")

    def update_ends(self) -> None:
        """Called after it."""
        self._end("update")
        self._was = "step"
        self._in_update = False

    def turn_ends(self) -> None:
        """Called where a loop asks for the next batch of an update; it has added the last one."""
        self._in_backward = False
        self._end("update")

    def _gap(self) -> str:
        """Returns the part that the time before a forward belongs to."""
        if self._in_update:
            return "update"
        if self._in_pipeline and self._was != "step":
            return "exchange"  # the stage waited for its neighbour
        return "forward" if self._was == "forward" else "data"

    def _backward_starts(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        self._pass("forward" if self._was == "forward" else "other")
        torch.autograd.Variable._execution_engine.queue_callback(self._gradients_ready)

    def _gradients_ready(self) -> None:
        # torch's reducer has queued its own callback by now, so the next one runs after the exchange.
        self._end("backward")
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._end("exchange")
        self._was = "backward"
        self._in_backward = False

    def _end(self, part: str) -> None:
        self._pass(part)
        self._was = part

    def _pass(self, part: str) -> None:
        """Counts the time since the last mark as ``part``."""
        if self.waits is not None:
            self.waits()
        now = self._clock()
        self.parts[part] += now - self._since
        if self.spans is not None:
            self.spans.append((part, self._since, now))
        self._since = now
