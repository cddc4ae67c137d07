"""One worker of the comparison of sharding stage 2 with torch's ``fully_shard``: steps of the GPT of ``examples/gpt``.

Arguments: what to do, name of a form, hidden, layers, rows of a worker, tokens of a row, folder for the results.
``turns`` times the forms in turn in the same processes; ``alone`` trains one form and writes its peak of memory;
``distance`` writes how far its weights are from those of one process.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fleet

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples" / "gpt")]
from _peak import measured_bytes  # noqa: E402
from _process import forget_peak, resident  # noqa: E402
from data import batches, open_text  # noqa: E402
from model import GptConfig, make_gpt, next_token_loss  # noqa: E402

Step = Callable[[Tensor, Tensor], Any]
BLOCKS, STEPS, ALONE_STEPS, LR = 11, 2, 4, 1e-3
UNIT_BYTES = 32 * 2**20  # segment_broadcast_MB


class Sizes:
    """The sizes of the model and its batches, from the arguments."""

    def __init__(self, hidden: str, layers: str, rows: str, length: str) -> None:
        self.rows, self.length = int(rows), int(length)
        self.config = GptConfig(hidden=int(hidden), layers=int(layers), heads=8, kv_heads=4, length=self.length)

    def model(self) -> nn.Module:
        """Returns a model with the same start on every call."""
        torch.manual_seed(0)
        return make_gpt(self.config)

    def batches(self, steps: int, share: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this worker's rows, or all."""
        world = dist.get_world_size()
        place = (dist.get_rank(), world) if share else (0, 1)
        return batches(open_text("python"), steps, self.rows * world, self.length, 0, *place)


def by_fleet(stage: int) -> Callable[[nn.Module], Step]:
    """Returns what prepares a training loop with Fleet's sharding."""

    def prepared(net: nn.Module) -> Step:
        strategy = fleet.DistributedStrategy()
        strategy.sharding = stage > 0
        strategy.sharding_configs = {"stage": max(stage, 1)}
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
        optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), LR))
        return loop(fleet.distributed_model(net), optimizer.step, optimizer.zero_grad)

    return prepared


def by_torch(net: nn.Module) -> Step:
    """Prepares torch's form of stage 2: parameters that are whole from forward to backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from fleet.strategies.sharding.units import plan_units

    mesh, named = init_device_mesh("cpu", (dist.get_world_size(),)), dict(net.named_modules())
    for target in [*(named[name] for name in plan_units(net, UNIT_BYTES)), net]:
        fully_shard(target, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters(), LR)
    return loop(net, optimizer.step, optimizer.zero_grad)


def loop(model: nn.Module, update: Callable[[], Any], clear: Callable[[], Any]) -> Step:
    """Returns one step of training."""

    def step(tokens: Tensor, targets: Tensor) -> None:
        next_token_loss(model(tokens), targets).backward()
        update()
        clear()

    return step


FORMS: dict[str, Callable[[nn.Module], Step]] = {
    "data parallel": by_fleet(0),
    "stage 1": by_fleet(1),
    "stage 2": by_fleet(2),
    "fully_shard": by_torch,
    "stage 3": by_fleet(3),
}
IN_TURNS = ("stage 2", "fully_shard")


def in_turns(_: str, sizes: Sizes) -> dict[str, Any]:
    """Returns seconds per step of each block, on the wall and of the processor, by form."""
    forms = {name: FORMS[name](sizes.model()) for name in IN_TURNS}
    found: dict[str, Any] = {name: {"wall": [], "processor": []} for name in forms}
    rows = list(sizes.batches(STEPS))
    for block in range(BLOCKS + 1):
        order = list(forms)
        for name in order[block % len(order) :] + order[: block % len(order)]:
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            for batch in rows:
                forms[name](*batch)
            processor = time.process_time() - processor
            dist.barrier()
            if block:  # the first block warms up
                found[name]["wall"].append((time.perf_counter() - wall) / STEPS)
                found[name]["processor"].append(processor / STEPS)
    return found


def alone(name: str, sizes: Sizes) -> dict[str, int]:
    """Returns the peaks of memory in bytes over those of the start: resident, and handed out by torch's allocator."""

    def train(sizes: Sizes = sizes) -> None:
        step = FORMS[name](sizes.model())
        for batch in sizes.batches(ALONE_STEPS):
            step(*batch)

    train(Sizes("32", "2", "1", "8"))  # what is imported and made once is in the start
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    train()
    peak = resident("VmHWM") - before
    gc.collect()
    left = measured_bytes(lambda: torch.empty(1))
    return {"resident": peak, "allocated": measured_bytes(train) - left}


def distance(name: str, sizes: Sizes) -> dict[str, float]:
    """Returns how far the weights are, at most, from those of one process that trains on all rows, in float64."""
    net, plain = sizes.model().double(), sizes.model().double()
    step, plain_step = FORMS[name](net), one_process(plain)
    rows = zip(sizes.batches(ALONE_STEPS), sizes.batches(ALONE_STEPS, share=False), strict=True)
    for own, everyone in rows:
        step(*own)
        plain_step(*everyone)
    whole = {key: p.full_tensor() if hasattr(p, "full_tensor") else p for key, p in net.named_parameters()}
    start = dict(sizes.model().double().named_parameters())
    return {
        "apart": max(float((whole[key] - p).abs().max()) for key, p in plain.named_parameters()),
        "moved": max(float((start[key] - p).abs().max()) for key, p in plain.named_parameters()),
    }


def one_process(net: nn.Module) -> Step:
    """Prepares plain torch."""
    optimizer = torch.optim.AdamW(net.parameters(), LR)
    return loop(net, optimizer.step, optimizer.zero_grad)


def main() -> None:
    """Measures, and writes ``<rank>.json``."""
    what, name, *sizes, folder = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fleet.init(is_collective=True, log_level="ERROR")
    measured: dict[str, Callable[[str, Sizes], Any]] = {"turns": in_turns, "alone": alone, "distance": distance}
    found = measured[what](name, Sizes(*sizes))
    (Path(folder) / f"{fleet.worker_index()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
