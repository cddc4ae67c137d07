"""The stages of a pipeline as threads of one process, with queues for wires: the engine without processes."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fleet.strategies.pipeline.order import MicroStep, StageStream, channel_in, channel_out
from fleet.strategies.pipeline.stage_run import StagePlace, StageRun, Work

_WAIT_S = 20.0


class QueueLink:
    """A link to a stage in the same process; counts the bytes that pass."""

    def __init__(self, wire: queue.Queue[Tensor], described: str) -> None:
        self.wire, self.described, self.device = wire, described, torch.device("cpu")
        self.sent_bytes: list[int] = []

    def send(self, tensor: Tensor) -> Any:
        """Puts a copy on the wire."""
        self.sent_bytes.append(tensor.numel() * tensor.element_size())
        self.wire.put(tensor.detach().clone())
        return None

    def receive(self, tensor: Tensor) -> Any:
        """Returns what waits for the next tensor on the wire."""
        return _Arrival(self.wire, tensor)

    def integers(self, values: Sequence[int]) -> Tensor:
        """Returns ``values`` as a tensor."""
        return torch.tensor(values, dtype=torch.int64)


class _Arrival:
    def __init__(self, wire: queue.Queue[Tensor], target: Tensor) -> None:
        self._wire, self._target = wire, target

    def wait(self) -> None:
        """Copies the next tensor, which must have the shape and type that were expected."""
        came = self._wire.get(timeout=_WAIT_S)
        assert (came.shape, came.dtype) == (self._target.shape, self._target.dtype)
        self._target.copy_(came)


class StageWork(Work):
    """What a stage computes: ``chunks`` of modules, and at the end ``loss(output, micro)``."""

    def __init__(
        self,
        chunks: Sequence[Callable[[Any], Any]],
        inputs: Sequence[Any],
        loss: Callable[[Any, int], Tensor],
    ) -> None:
        self.chunks, self._inputs, self._loss = chunks, inputs, loss
        self.losses: list[float] = []
        self.live = self.most_live = 0

    def input(self, micro: int) -> Any:
        """Returns the data of a micro-batch."""
        return self._inputs[micro]

    def run(self, chunk: int, micro: int, value: Any) -> Any:
        """Runs a chunk."""
        return self.chunks[chunk](value)

    def loss(self, micro: int, output: Any) -> Tensor | None:
        """Returns where backward begins."""
        value = self._loss(output, micro)
        self.losses.append(value.item())
        return value

    def hook(self, location: str, action: MicroStep, **tensors: Any) -> None:
        """Counts micro-batches between their forward and their backward."""
        self.live += {"forward_begin": 1, "backward_end": -1}.get(location, 0)
        self.most_live = max(self.most_live, self.live)


def make_places(num_stages: int, num_chunks: int = 1, mode: str = "1F1B") -> list[StagePlace]:
    """Returns the stages, linked by queues."""
    wires: dict[StageStream, queue.Queue[Tensor]] = defaultdict(queue.Queue)
    places = [StagePlace(num_stages, stage, num_chunks, mode) for stage in range(num_stages)]
    for stage, place in enumerate(places):
        for action in place.order(1):
            source = channel_in(action, stage, num_stages, num_chunks)
            target = channel_out(action, stage, num_stages, num_chunks)
            links: Any = (place.links_in, source), (place.links_out, target)
            for held, channel in links:
                if channel is not None and channel not in held:
                    held[channel] = QueueLink(wires[channel], f"a peer of stage {stage}")
    return places


def run_stages(
    places: Sequence[StagePlace],
    works: Sequence[Any],
    num_micro: int,
    *,
    signature: int | None = 1,
    trains: bool = True,
) -> None:
    """Runs one step of all stages; raises the first error of one."""
    errors: list[BaseException] = []

    def run(place: StagePlace, work: Any) -> None:
        try:
            with nullcontext() if trains else torch.no_grad():
                StageRun(place, work, num_micro, signature=signature, trains=trains).run()
        except BaseException as error:  # the test's thread raises it
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in zip(places, works, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _WAIT_S)
    if errors:
        raise errors[0]


def split_chunks(parts: Sequence[nn.Module], num_stages: int) -> list[list[nn.Module]]:
    """Returns the chunks of each stage: part ``i`` is on stage ``i % num_stages``."""
    return [list(parts[stage::num_stages]) for stage in range(num_stages)]
