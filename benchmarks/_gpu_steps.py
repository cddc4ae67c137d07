"""One case of the GPU benchmark: plain torch and fleet train the same model in turns, in one process.

Blocks of steps take turns, so that a slow moment of the machine or a warmer chip hits both. ``gpu.py`` starts this
script once for each case and reads what it writes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fleet import fleet

EXAMPLES = Path(__file__).parents[1] / "examples"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Step: TypeAlias = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Args:
        depth: layers of the ResNet.
        width: channels of its first stage.
        image: edge of an image.
        batch: images of a step.
        vocab_size: tokens of the GPT; 12 blocks of 768 values and 50,304 tokens make 124 M parameters.
        hidden: values of a token.
        layers: blocks.
        heads: heads of a block.
        length: tokens of a sequence.
        sequences: sequences of a step.
        blocks: blocks of steps that are measured, of each of the two.
        steps: steps of a block.
    """

    depth: int = 50
    width: int = 64
    image: int = 224
    batch: int = 256
    vocab_size: int = 50304
    hidden: int = 768
    layers: int = 12
    heads: int = 12
    length: int = 1024
    sequences: int = 16
    blocks: int = 8
    steps: int = 10


FULL = Size()
TRY = Size(18, 4, 16, 4, 64, 32, 2, 2, 16, 2, 2, 2)


@dataclass(frozen=True)
class Task:
    """What a case trains: a model, one batch, its loss, and how many samples or tokens a step takes."""

    model: Callable[[], nn.Module]
    inputs: Tensor
    loss: Callable[[Tensor], Tensor]
    per_step: int


def resnet_task(size: Size) -> Task:
    """Returns the ResNet on images of noise, channels last."""
    sys.path.insert(0, str(EXAMPLES / "resnet"))
    from model import ResNet

    def model() -> nn.Module:
        made: nn.Module = ResNet(size.depth, 1000, stem="imagenet" if size.image > 64 else "small", width=size.width)
        return made.to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    images = torch.randn(size.batch, 3, size.image, size.image, device=DEVICE)
    labels = torch.randint(0, 1000, (size.batch,), device=DEVICE)
    loss = partial(nn.functional.cross_entropy, target=labels)
    return Task(model, images.to(memory_format=torch.channels_last), loss, size.batch)


def gpt_task(size: Size) -> Task:
    """Returns a GPT on tokens of noise: learned positions, LayerNorm, GELU, as many key heads as query heads."""
    sys.path.insert(0, str(EXAMPLES / "gpt"))
    from model import GptConfig, make_gpt, next_token_loss

    kinds = {"positions": "learned", "norm": "layer", "activation": "gelu"}
    config = GptConfig(size.vocab_size, size.hidden, size.layers, size.heads, size.heads, size.length, **kinds)
    shape = (size.sequences, size.length + 1)
    tokens = torch.randint(0, size.vocab_size, shape, device=DEVICE)
    loss = partial(next_token_loss, targets=tokens[:, 1:].contiguous())
    return Task(lambda: make_gpt(config).to(DEVICE), tokens[:, :-1].contiguous(), loss, size.sequences * size.length)


class Recomputed(nn.Module):
    """A GPT whose blocks compute their activations again in backward, as plain torch writes it."""

    def __init__(self, parts: nn.Sequential) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits."""
        first, *blocks, last = self.parts
        x = first(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        out: Tensor = last(x)
        return out


CASES: dict[str, Callable[[Size], Task]] = {
    "resnet": resnet_task,
    "gpt": gpt_task,
    "gpt to_static": gpt_task,
    "gpt recompute": gpt_task,
}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the same optimizer for both."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE.type == "cuda")


def with_torch(case: str, task: Task) -> Step:
    """Returns a step of plain torch under autocast to bfloat16."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = optimizer_of(model)
    if case == "gpt recompute":
        assert isinstance(model, nn.Sequential)
        model = Recomputed(model)
    run = torch.compile(model) if case == "gpt to_static" else model

    def step() -> None:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = task.loss(run(task.inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_fleet(case: str, task: Task, layers: int) -> Step:
    """Returns the same step, written with fleet."""
    strategy = fleet.DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"dtype": "bfloat16"}
    strategy.to_static = case == "gpt to_static"
    if case == "gpt recompute":
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": [str(place) for place in range(1, layers + 1)]}
    fleet.init(is_collective=True, strategy=strategy, log_level="WARNING")
    torch.manual_seed(0)
    model = task.model()
    optimizer = fleet.distributed_optimizer(optimizer_of(model))
    run = fleet.distributed_model(model)

    def step() -> None:
        loss = task.loss(run(task.inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def finish() -> None:
    """Returns when the device has nothing left to do."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def allocated() -> int:
    """Returns the bytes of torch's allocator on the GPU, 0 without one."""
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def seconds_of(step: Step, steps: int) -> float:
    """Returns the seconds of a step, over a block of them."""
    finish()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    finish()
    return (time.perf_counter() - start) / steps


def peak_of(step: Step, resident: int) -> int:
    """Returns the most bytes that a step holds on the GPU, without what the other of the two keeps there."""
    finish()
    before = allocated()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    finish()
    return torch.cuda.max_memory_allocated() - before + resident if DEVICE.type == "cuda" else 0


def idle_share(step: Step, steps: int = 3) -> float | None:
    """Returns the share of a profiled window in which the GPU ran no kernel; None without a GPU."""
    if DEVICE.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        finish()
    spans = [(event.time_range.start, event.time_range.end) for event in profile.events() or []]
    return gaps([span for span in spans if span[1] > span[0]])


def gaps(spans: list[tuple[float, float]]) -> float | None:
    """Returns the share of the time from first start to last end that no span covers; None without spans."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - covered / (reached - min(start for start, _ in spans)) if spans else None


def measure(case: str, size: Size) -> dict[str, object]:
    """Trains both in turns; returns seconds of each block, peaks, idle shares and what a step takes."""
    task = CASES[case](size)
    loops: dict[str, Step] = {}
    resident: dict[str, int] = {}
    for name, make in (("torch", with_torch), ("fleet", partial(with_fleet, layers=size.layers))):
        before = allocated()
        loops[name] = make(case, task)
        seconds_of(loops[name], 3)  # compiles, times convolutions, makes the optimizer's state
        resident[name] = allocated() - before
    times: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(size.blocks):
        for name in loops if block % 2 else reversed(loops):
            times[name].append(seconds_of(loops[name], size.steps))
    return {
        "seconds": times,
        "per_step": task.per_step,
        "peak_bytes": {name: peak_of(step, resident[name]) for name, step in loops.items()},
        "idle": {name: idle_share(step) for name, step in loops.items()},
    }


if __name__ == "__main__":
    found = measure(sys.argv[1], TRY if sys.argv[2] == "try" else FULL)
    Path(sys.argv[3]).write_text(json.dumps(found))
