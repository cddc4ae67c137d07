"""One worker of the step-time benchmark: the same ResNet under each library, in turn, block by block.

Every library trains its own copy of the model in the same processes and on the same data; the blocks of steps take
turns, so that a slow moment of the machine hits all of them. Rank 0 writes the seconds per step of each block.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fleet

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "resnet"))
from model import ResNet  # noqa: E402

Step = Callable[[torch.Tensor, torch.Tensor], None]


def fresh(depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the same model and optimizer at each call."""
    torch.manual_seed(0)
    model = ResNet(depth, 10, stem="small", width=16)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def plain_loop(model: Any, optimizer: Any) -> Step:
    """Returns one step of a plain torch loop."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_fleet(depth: int) -> Step:
    """The loop under fleet."""
    model, optimizer = fresh(depth)
    optimizer = fleet.distributed_optimizer(optimizer)
    return plain_loop(fleet.distributed_model(model), optimizer)


def with_ddp(depth: int) -> Step:
    """The loop under DistributedDataParallel written by hand, torch's defaults."""
    model, optimizer = fresh(depth)
    return plain_loop(DistributedDataParallel(model), optimizer)


def with_accelerate(depth: int) -> Step:
    """The loop under Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if accelerator.num_processes != dist.get_world_size():
        raise RuntimeError(f"Accelerate sees {accelerator.num_processes} processes")
    model, optimizer = accelerator.prepare(*fresh(depth))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_fabric(depth: int) -> Step:
    """The loop under Lightning Fabric."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    world = dist.get_world_size()
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=world)
    fabric.launch()
    if fabric.world_size != world:
        raise RuntimeError(f"Fabric sees {fabric.world_size} processes")
    model, optimizer = fabric.setup(*fresh(depth))

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Runs the blocks and writes ``{library: [seconds per step, ...]}``."""
    depth, batch, blocks, steps = (int(argument) for argument in sys.argv[1:5])
    fleet.init(is_collective=True, log_level="WARNING")
    makers = {"fleet": with_fleet, "DDP by hand": with_ddp}
    if importlib.util.find_spec("accelerate"):
        makers["Accelerate"] = with_accelerate
    if importlib.util.find_spec("lightning_fabric"):
        makers["Lightning Fabric"] = with_fabric
    loops = {name: make(depth) for name, make in makers.items()}
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    times: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(blocks + 1):
        # Forwards, then backwards, so that no library always follows the same one.
        for name in loops if block % 2 else reversed(loops):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                loops[name](x, y)
            dist.barrier()
            if block:  # the first block warms up
                times[name].append((time.perf_counter() - start) / steps)
    if fleet.is_first_worker():
        Path(sys.argv[5]).write_text(json.dumps(times))


if __name__ == "__main__":
    main()
