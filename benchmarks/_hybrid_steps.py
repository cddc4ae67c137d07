"""One job of hybrid.py: trains several forms of one model in the same processes, step by step in turns.

Called by the launcher as ``_hybrid_steps.py WHAT SIZE STEPS RESULT``; rank 0 writes the result as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _hybrid_models import SIZES, Size, batch, cut_by_torch, layers_of, loss_of  # noqa: E402
from _hybrid_overlap import overlap  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from fleet import fleet  # noqa: E402

MICRO_BATCHES = 8
Step = Callable[[], Any]


def init(degrees: dict[str, int], micro_batches: int = MICRO_BATCHES, rows: int = 16) -> None:
    """Starts the job on a mesh."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    strategy.pipeline_configs = {"accumulate_steps": micro_batches, "micro_batch_size": rows // micro_batches}
    fleet.init(is_collective=True, strategy=strategy)


def in_turns(steps: dict[str, Step], count: int) -> dict[str, list[float]]:
    """Runs every step once for warm-up and then ``count`` times, in turns; returns seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(count + 1):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def plain_step(model: nn.Module, optimizer: Any, size: Size) -> Step:
    """Returns the loop of the tutorial: forward, backward, step, zero_grad."""
    x, y = batch(size)

    def step() -> None:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor_parallel(size: Size, count: int) -> dict[str, Any]:
    """Times Fleet's layers, the same by hand, and torch's parallelize_module."""
    init({"mp": dist_size()})
    steps: dict[str, Step] = {}
    for form in ("fleet", "hand", "torch"):
        torch.manual_seed(5)
        model: nn.Module = nn.Sequential(*layers_of(form, size))
        if form == "torch":
            model = cut_by_torch(model)  # type: ignore[arg-type]
        # foreach mixes DTensors and plain tensors in one call, which torch refuses.
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False if form == "torch" else None)
        if form == "fleet":
            model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
        steps[form] = plain_step(model, optimizer, size)
    return {"times": in_turns(steps, count)}


def pipeline(size: Size, count: int) -> dict[str, Any]:
    """Times train_batch against torch's Schedule1F1B with the same cut and the same optimizer."""
    from fleet import meta_parallel as mpu

    init({"pp": dist_size()})
    torch.manual_seed(5)
    layers = layers_of("torch", size)
    model = mpu.PipelineLayer(layers, num_stages=dist_size(), loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    wrapped, stepper = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    x, y = batch(size)
    dist.barrier()  # workers that start at different times are no cost of the first step
    first = time.perf_counter()
    wrapped.train_batch([x, y], stepper)
    first = time.perf_counter() - first
    theirs = torch_pipeline(size, list(model.segment_parts))
    times = in_turns({"fleet": lambda: wrapped.train_batch([x, y], stepper), "torch": theirs["step"]}, count)
    return {"times": times, "first": {"fleet": first, "torch": theirs["first"]}}


def torch_pipeline(size: Size, parts: list[int]) -> dict[str, Any]:
    """Returns a step of torch's own pipeline, and the seconds of the first one."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    stage_module = nn.Sequential(*layers_of("torch", size)[parts[rank] : parts[rank + 1]])
    stage = PipelineStage(stage_module, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage_module.parameters(), 1e-3)
    x, y = batch(size)

    def step() -> None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()

    start = time.perf_counter()
    step()
    return {"step": step, "first": time.perf_counter() - start}


class Sleep(torch.autograd.Function):
    """Takes a fixed time forward and twice as long backward, without needing a core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        """Sleeps."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Sleeps twice as long."""
        time.sleep(2 * ctx.seconds)
        return gradient, gradient.sum(), None


class Sleeper(nn.Module):
    """A layer that computes nothing."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(())), seconds

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x``."""
        result: Tensor = Sleep.apply(x, self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return result


def bubble(virtual: int, count: int) -> dict[str, Any]:
    """Times stages of 40 ms; with ``virtual`` chunks each layer of a stage takes its share of them."""
    from fleet import meta_parallel as mpu

    init({"pp": dist_size()})
    layers = [mpu.LayerDesc(Sleeper, 0.04 / virtual) for _ in range(dist_size() * virtual)]
    chunks: Any = {"num_virtual_pipeline_stages": virtual, "seg_method": "layer:Sleeper"} if virtual > 1 else {}
    model = mpu.PipelineLayer(layers, num_stages=dist_size(), loss_fn=lambda out, _: out.mean(), **chunks)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    wrapped, stepper = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    data = [torch.ones(16, 4), torch.ones(16, 1)]
    times = in_turns({"fleet": lambda: wrapped.train_batch(data, stepper)}, count)
    return {"times": times, "busy": MICRO_BATCHES * 0.12}


def sequence_parallel(size: Size, count: int) -> dict[str, Any]:
    """Times Fleet's sequence-parallel layers and torch's styles."""
    from _hybrid_sequence import SequenceModel, cut_by_torch_with_sequences

    init({"mp": dist_size()})
    steps: dict[str, Step] = {}
    for form in ("fleet", "torch"):
        torch.manual_seed(5)
        if form == "fleet":
            model: Any = SequenceModel(size)
            optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
            model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
        else:
            model = cut_by_torch_with_sequences(nn.Sequential(*layers_of("torch", size)))
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
        steps[form] = plain_step(model, optimizer, size)
    return {"times": in_turns(steps, count)}


def traffic(axis: str, size: Size) -> dict[str, Any]:
    """Counts the bytes that the calls of one step hand to torch: sums along mp, activations between stages."""
    from fleet import meta_parallel as mpu

    init({axis: dist_size()})
    x, y = batch(size)
    if axis == "mp":
        model: Any = nn.Sequential(*layers_of("fleet", size))
        optimizer: Any = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
        step = plain_step(fleet.distributed_model(model), optimizer, size)
    else:
        model = mpu.PipelineLayer(layers_of("torch", size), num_stages=dist_size(), loss_fn=loss_of)
        optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
        wrapped = fleet.distributed_model(model)

        def step() -> None:
            wrapped.train_batch([x, y], optimizer)

    for _ in range(2):
        step()
    counted: dict[str, int] = {}
    for name in ("all_reduce", "isend"):
        setattr(dist, name, counting(getattr(dist, name), name, counted))
    step()
    activation = size.rows * size.tokens * size.hidden * 4
    # Along mp a block sums twice forward, and backward once for each of q, k, v and up.
    formula = {"mp": 6 * size.layers * activation, "pp": activation}[axis]
    return {"counted": counted["all_reduce" if axis == "mp" else "isend"], "formula": formula}


def counting(call: Any, name: str, counted: dict[str, int]) -> Any:
    """Returns ``call``, which adds the bytes of its tensor to ``counted``."""

    def wrapped(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted[name] = counted.get(name, 0) + tensor.numel() * tensor.element_size()
        return call(tensor, *args, **kwargs)

    return wrapped


def held(size: Size) -> dict[str, Any]:
    """Returns bytes of parameters and optimizer state of the fullest of mp2 x pp2 workers, and of the whole model."""
    from fleet import meta_parallel as mpu

    init({"mp": 2, "pp": 2})
    layers = layers_of("fleet", size)
    layers[0] = mpu.VocabParallelEmbedding(size.vocab, size.hidden)
    layers[-1] = mpu.ColumnParallelLinear(size.hidden, size.vocab, has_bias=False)
    model = mpu.PipelineLayer(layers, num_stages=2, loss_fn=loss_of)
    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    wrapped, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(inner)
    wrapped.train_batch(list(batch(size)), optimizer)
    tensors = [*model.parameters(), *(t for state in inner.state.values() for t in state.values())]
    mine = torch.tensor(float(sum(t.numel() * t.element_size() for t in tensors)))
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    whole = sum(p.numel() for layer in layers_of("torch", size) for p in layer.parameters())
    return {"held": mine.item(), "whole": 3.0 * 4 * whole}


def dist_size() -> int:
    """Returns the number of workers, before and after ``fleet.init``."""
    return fleet.get_world_size()


def main() -> None:
    """Runs one job."""
    what, size, count, result = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "mp": lambda: tensor_parallel(SIZES[size], count),
        "sequence": lambda: sequence_parallel(SIZES[size], count),
        "mp_bytes": lambda: traffic("mp", SIZES[size]),
        "pp_bytes": lambda: traffic("pp", SIZES[size]),
        "memory": lambda: held(SIZES[size]),
        "pp": lambda: pipeline(SIZES[size], count),
        "bubble": lambda: bubble(1, count),
        "interleaved": lambda: bubble(2, count),
        "overlap": lambda: overlap(count),
    }
    found = jobs[what]()
    if fleet.is_first_worker():
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
