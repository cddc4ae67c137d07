"""A worker or the server of ``ps.py``: blocks of steps on the servers and in plain torch, in turn.

Each block lasts a fixed time and starts on both workers together, so what another process takes from the machine is
taken from both kinds alike. Plain torch has an ``nn.Embedding`` of the whole vocabulary in each worker and exchanges
nothing. Writes ``samples.RANK.json``: by batch size, kind and block, samples per second and the processor time of a
sample in microseconds, the server's on worker 0 included.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "wide_and_deep"))
from model import HashedEmbedding, WideDeep

from fleet import fleet

SLOTS, NUM_DENSE, DIM = (1,) * 26, 13, 10
SAMPLES = 32_768
# "merged" is async with the queue lengths that Paddle's communicator takes from its flags.
MERGED = {"max_merge_var_num": 20, "min_send_grad_num_before_recv": 40, "send_queue_size": 20}
CONFIGS: dict[str, dict[str, int]] = {"sync": {}, "async": {}, "merged": MERGED, "geo": {"k_steps": 100}}
Batch = tuple[Tensor, Tensor, Tensor]


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
    vocabulary = settings["vocabulary"]
    plain = WideDeep(lambda dim: HashedEmbedding(vocabulary, dim), SLOTS, NUM_DENSE, DIM)
    plain_optimizer = torch.optim.SGD(plain.parameters(), 1e-4)
    served = WideDeep(fleet.SparseEmbedding, SLOTS, NUM_DENSE, DIM)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(served.parameters(), 1e-4), strategy)
    served = fleet.distributed_model(served)
    fleet.init_worker()
    fill(served, optimizer, vocabulary)
    fleet.barrier_worker()
    samples = draw(vocabulary, 1 + fleet.worker_index())
    server = Path("/proc", Path(settings["folder"], "server").read_text(), "stat") if fleet.is_first_worker() else None
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for size in settings["batches"]:
        rates = found[str(size)] = {"served": [], "plain": []}
        batches = batches_of(samples, size)
        for number in range(settings["blocks"] + 1):
            kinds = {"plain": (plain, plain_optimizer), "served": (served, optimizer)}
            for name in sorted(kinds, reverse=bool(number % 2)):
                fleet.barrier_worker()
                measured = block(*kinds[name], batches, settings["seconds"], server)
                if number:  # the first one warms up
                    rates[name].append(measured)
    fleet.barrier_worker()
    Path(settings["folder"], f"samples.{fleet.worker_index()}.json").write_text(json.dumps(found))
    fleet.stop_worker()


def draw(vocabulary: int, seed: int) -> Batch:
    """Returns samples whose ids follow a power law in each slot and lie anywhere in 62 bits."""
    rng = np.random.default_rng(seed)
    edges = np.cumsum(np.arange(1, vocabulary // len(SLOTS) + 1, dtype=np.float64) ** -1.2)
    ranks = np.searchsorted(edges / edges[-1], rng.random((SAMPLES, len(SLOTS))))
    ids = scattered(ranks * len(SLOTS) + np.arange(len(SLOTS)))
    dense = rng.standard_normal((SAMPLES, NUM_DENSE)).astype(np.float32)
    labels = (rng.random(SAMPLES) < 0.25).astype(np.float32)
    return torch.from_numpy(ids), torch.from_numpy(dense), torch.from_numpy(labels)


def scattered(ranks: np.ndarray) -> np.ndarray:
    """Returns distinct ids for distinct ranks."""
    return (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(2)).astype(np.int64)


def fill(model: Any, optimizer: Any, vocabulary: int) -> None:
    """Makes every row on the servers with a gradient of zeros, so that a step meets a table of the full size."""
    ids = torch.from_numpy(scattered(np.arange(vocabulary)))
    for part in ids.split(100_000):
        model.rows.table(part).mul(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def batches_of(samples: Batch, size: int) -> Iterator[Batch]:
    """Yields batches forever."""
    starts = cycle(range(0, SAMPLES - size, size))
    return (tuple(part[start : start + size] for part in samples) for start in starts)  # type: ignore[misc]


def block(
    model: Any, optimizer: Any, batches: Iterator[Batch], seconds: float, server: Path | None = None
) -> tuple[float, float]:
    """Trains for a time; returns samples per second, and microseconds of processor time per sample."""
    done, start, used = 0, time.perf_counter(), processor_s(server)
    while time.perf_counter() - start < seconds:
        ids, dense, labels = next(batches)
        loss = binary_cross_entropy_with_logits(model(ids, dense), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        done += len(labels)
    return done / (time.perf_counter() - start), 1e6 * (processor_s(server) - used) / done


def processor_s(server: Path | None) -> float:
    """Returns the processor time of this process, and of the server where it is given."""
    if server is None:
        return time.process_time()
    user, system = server.read_text().rpartition(")")[2].split()[11:13]
    return time.process_time() + (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
