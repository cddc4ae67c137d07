"""A worker that trains ResNet for some steps and writes the most memory that torch's allocator had handed out.

On a GPU that is ``torch.cuda.max_memory_allocated``. On the CPU it is the largest "Total Allocated" of the profiler's
memory events: the CPU allocator reports every allocation there, those inside operations included.

Arguments: depth, batch size, height and width, optimizer, strategy (JSON), steps, folder for the results.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from fleet import fleet
from fleet.elastic import logical_ranks

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples" / "resnet")]
from _peak import measured_bytes  # noqa: E402
from model import ResNet  # noqa: E402


def train(
    depth: int, batch_size: int, size: int, optimizer_name: str, strategy: fleet.DistributedStrategy, steps: int
) -> None:
    """Trains on random images, with the loss that an estimate assumes."""
    fleet.init(is_collective=True, strategy=strategy)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ResNet(depth).to(device)
    optimizers: dict[str, Any] = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.001),
    }
    optimizer = fleet.distributed_optimizer(optimizers[optimizer_name](model.parameters()))
    model = fleet.distributed_model(model)
    for _ in (turn for _ in range(steps) for turn in logical_ranks()):
        images = torch.empty(batch_size, 3, size, size, device=device).normal_()
        loss = model(images).mean()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
        del images


def main(arguments: list[str]) -> None:
    """Writes ``<rank>.json`` with the peak in bytes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    depth, batch_size, size, optimizer, text, steps, folder = arguments
    strategy = fleet.DistributedStrategy()
    strategy.update(json.loads(text))
    peak = measured_bytes(lambda: train(int(depth), int(batch_size), int(size), optimizer, strategy, int(steps)))
    (Path(folder) / f"{fleet.worker_index()}.json").write_text(json.dumps(peak))


if __name__ == "__main__":
    main(sys.argv[1:])
