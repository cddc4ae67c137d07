"""A worker or the server of ``ps.py --only script``: FleetX's wide & deep in the plain loop that a user writes.

``nn.Embedding(1000001, 10, sparse=True)``, 26 categories and 13 numbers of Criteo's rows, three layers of 400, SGD;
nothing is tuned. Both workers also train the same model without servers, each alone, in blocks in turn with those of
the job. Writes ``samples.RANK.json``: by batch size, kind and block, samples per second, and microseconds of processor
time per step of this worker and (worker 0) of the server, which works for both workers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "wide_and_deep"))
from _ps_steps import Batch, batches_of, processor_s

from fleet import fleet

ROWS, DIM, NUM_SLOTS, NUM_DENSE = 1_000_001, 10, 26, 13
SAMPLES, DRAWN = 32_768, 200  # a sample of Criteo's has so many rows; they are repeated
RATE = 1e-4
CONFIGS: dict[str, dict[str, int]] = {"sync": {}, "async": {}, "geo": {"k_steps": 100}}
Measured = tuple[float, float, float]


class WideDeep(nn.Module):
    """Logits (batch,) of ids (batch, 26) and numbers (batch, 13)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, DIM, sparse=True)
        self.wide = nn.Linear(NUM_DENSE, 1)
        widths = (NUM_SLOTS * DIM + NUM_DENSE, 400, 400, 400)
        layers: list[nn.Module] = []
        for i in range(3):
            layers += [nn.Linear(widths[i], widths[i + 1]), nn.ReLU()]
        self.deep = nn.Sequential(*layers, nn.Linear(400, 1))

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Returns the logits."""
        rows = self.embedding(ids).flatten(1)
        return (self.wide(dense) + self.deep(torch.cat([rows, dense], 1))).squeeze(1)


def main() -> None:
    """Runs what the settings in argument 1 say."""
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = settings["mode"] != "sync"
    strategy.a_sync_configs = CONFIGS[settings["mode"]]
    fleet.init(strategy=strategy)
    if fleet.is_server():
        Path(settings["folder"], "server").write_text(str(os.getpid()))
        fleet.init_server()
        fleet.run_server()
        return
    torch.manual_seed(0)
    local = WideDeep()
    local_optimizer = torch.optim.SGD(local.parameters(), RATE)
    served = WideDeep()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(served.parameters(), RATE), strategy)
    served = fleet.distributed_model(served)
    fleet.init_worker()
    samples = read(settings["data"]) if settings["data"] else draw(1 + fleet.worker_index())
    server = Path("/proc", Path(settings["folder"], "server").read_text(), "stat") if fleet.is_first_worker() else None
    found: dict[str, dict[str, list[Measured]]] = {}
    for size in settings["batches"]:
        measured = found[str(size)] = {"served": [], "local": []}
        batches = batches_of(samples, size)
        for number in range(settings["blocks"] + 1):
            kinds = {"local": (local, local_optimizer), "served": (served, optimizer)}
            for name in sorted(kinds, reverse=bool(number % 2)):
                fleet.barrier_worker()
                block_measured = block(*kinds[name], batches, settings["seconds"], server)
                if number:  # the first one warms up
                    measured[name].append(block_measured)
    fleet.barrier_worker()
    Path(settings["folder"], f"samples.{fleet.worker_index()}.json").write_text(json.dumps(found))
    fleet.stop_worker()


def draw(seed: int) -> Batch:
    """Returns rows of Criteo's shape whose ids follow a power law in each slot."""
    rng = np.random.default_rng(seed)
    per_slot = (ROWS - 1) // NUM_SLOTS
    edges = np.cumsum(np.arange(1, per_slot + 1, dtype=np.float64) ** -1.2)
    ranks = np.searchsorted(edges / edges[-1], rng.random((DRAWN, NUM_SLOTS)))
    ids = 1 + ranks * NUM_SLOTS + np.arange(NUM_SLOTS)
    dense = rng.standard_normal((DRAWN, NUM_DENSE)).astype(np.float32)
    labels = (rng.random(DRAWN) < 0.25).astype(np.float32)
    return repeated(ids, dense, labels)


def read(path: str) -> Batch:
    """Returns the rows of files in Criteo's format."""
    from criteo import read_criteo

    found, _ = read_criteo(Path(path))
    return repeated(found.ids % ROWS, found.dense, found.labels)


def repeated(*arrays: np.ndarray) -> Batch:
    """Returns the rows of ``arrays``, repeated to the same number of them."""
    places = np.arange(SAMPLES) % len(arrays[0])
    ids, dense, labels = (torch.from_numpy(array[places]) for array in arrays)
    return ids, dense, labels


def block(model: Any, optimizer: Any, batches: Iterator[Batch], seconds: float, server: Path | None) -> Measured:
    """Trains for a time; returns samples per second and processor time per step of this process and of the server."""
    done = steps = 0
    own, start = time.process_time(), time.perf_counter()
    everything = processor_s(server)
    while time.perf_counter() - start < seconds:
        ids, dense, labels = next(batches)
        loss = binary_cross_entropy_with_logits(model(ids, dense), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += len(labels)
        steps += 1
    rate = done / (time.perf_counter() - start)
    here = time.process_time() - own
    return rate, 1e6 * here / steps, 1e6 * (processor_s(server) - everything - here) / steps


if __name__ == "__main__":
    main()
