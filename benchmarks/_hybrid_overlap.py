"""A pipeline of two copies on a slow wire: steps with the exchange after, during, and without the last micro-batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleet import fleet

MICRO_BATCHES, LAYERS, WIDTH = 2, 8, 512
FORWARD_S, BACKWARD_S = 0.010, 0.030
# A layer's gradients, 1 MiB, take 80 % of its backward.
WIRE_BYTES_PER_S = WIDTH * WIDTH * 4 / (0.8 * BACKWARD_S)


class SlowWire:
    """Stands for ``torch.distributed.all_reduce``: a sum takes as long as the wire needs, one after the other.

    Attributes:
        carries: False leaves the sums of gradients out.
    """

    def __init__(self) -> None:
        self._all_reduce, self._free_at = dist.all_reduce, 0.0
        self.carries = True

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Sums as torch does; the work of an exchange in the background ends when the wire has carried it."""
        if not kwargs.get("async_op"):
            return self._all_reduce(tensor, *args, **kwargs)
        if not self.carries:
            return _Arrival(None, 0.0)
        self._free_at = max(self._free_at, time.perf_counter()) + tensor.nbytes / WIRE_BYTES_PER_S
        return _Arrival(self._all_reduce(tensor, *args, **kwargs), self._free_at)


class _Arrival:
    """The end of a sum."""

    def __init__(self, work: Any, at: float) -> None:
        self._work, self._at = work, at

    def wait(self) -> None:
        """Waits for torch, then for the wire."""
        if self._work is not None:
            self._work.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))


class _Nap(torch.autograd.Function):
    """Takes a fixed time, without a core; the gradient of the weight comes at the end of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Sleeps."""
        ctx.like = weight
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Sleeps longer."""
        time.sleep(BACKWARD_S)
        return gradient, torch.zeros_like(ctx.like)


class NapLayer(nn.Module):
    """A layer with a weight that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``."""
        result: Tensor = _Nap.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return result


def overlap(count: int) -> dict[str, Any]:
    """Times train_batch of pp2 x dp2 with dp_comm_overlap off and on, and without an exchange, in turns."""
    from fleet import meta_parallel as mpu
    from fleet.strategies.pipeline.stage import stage_of

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2, "dp_degree": 2, "pp_configs": {"dp_comm_overlap": True}}
    strategy.pipeline_configs = {"accumulate_steps": MICRO_BATCHES, "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy)
    layers = [mpu.LayerDesc(NapLayer) for _ in range(2 * LAYERS)]
    model = mpu.PipelineLayer(layers, num_stages=2, loss_fn=lambda out, _: out.mean())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.0))
    wrapped = fleet.distributed_model(model)
    stage = stage_of(model)
    assert stage is not None
    assert stage.reducer.overlaps
    wire = SlowWire()
    dist.all_reduce = wire
    data = [torch.ones(MICRO_BATCHES, 4), torch.ones(MICRO_BATCHES, 1)]

    def step(overlaps: bool, carries: bool) -> Callable[[], float]:
        def run() -> float:
            stage.reducer.overlaps, wire.carries = overlaps, carries
            dist.barrier()
            start = time.perf_counter()
            wrapped.train_batch(data, optimizer)
            dist.barrier()  # until the slowest
            return time.perf_counter() - start

        return run

    forms = {"off": step(False, True), "on": step(True, True), "none": step(False, False)}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(count + 1):
        for name, run in forms.items():
            seconds = run()
            if turn:
                times[name].append(seconds)
    return {"times": times}
