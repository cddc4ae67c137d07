"""The least that a step with exchanged dense gradients takes here: two processes, one memory, no server (``ps.py``).

Both train the script's model (:mod:`_ps_script`), whose dense parameters lie in memory that they share. After backward
each copies its gradients there; once both have, each updates a half of the parameters by the mean, and once both have,
they go on. There are no messages, no rows that travel, no journal and no process beside the two; a process that waits
yields its processor. In blocks in turn with plain torch in the first process, while the second one waits; prints
samples per second of a process and block, as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

sys.path.insert(0, str(Path(__file__).parent))
from _ps_script import RATE, WideDeep, draw
from _ps_steps import Batch, batches_of

PAGE = mmap.PAGESIZE
STEPS = 200  # of a block
PUSHED, APPLIED, MET = 0, 16, 32  # places of each process's counts, on cache lines of their own


class Memory:
    """Counts, parameters and the gradients of two processes in one memory; inherited by a fork."""

    def __init__(self, size: int) -> None:
        room = -(-4 * size // PAGE) * PAGE
        whole = np.frombuffer(mmap.mmap(-1, PAGE + 3 * room), np.uint8)
        self.counts = whole[:PAGE].view(np.int64)
        self.values, *self.gradients = (
            torch.from_numpy(whole[start : start + 4 * size].view(np.float32))
            for start in range(PAGE, PAGE + 3 * room, room)
        )

    def wait(self, place: int, number: int) -> None:
        """Waits until the count at ``place`` has reached ``number``."""
        while self.counts[place] < number:
            os.sched_yield()


def views(flat: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Returns the part of ``flat`` for each parameter, in its shape."""
    parts = flat.split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def train(rank: int, memory: Memory, model: WideDeep, batches: Iterator[Batch]) -> Callable[[int], None]:
    """Returns what trains the step with a number, from 1, together with the other process."""
    weight = model.embedding.weight
    dense = [p for p in model.parameters() if p is not weight]
    for p, own in zip(dense, views(memory.values, dense), strict=True):
        p.data = own
    pushed = views(memory.gradients[rank], dense)

    @torch.no_grad()
    def update(number: int) -> None:
        memory.counts[PUSHED + 8 * rank] = number
        weight.add_(weight.grad, alpha=-RATE)
        memory.wait(PUSHED + 8 * (1 - rank), number)
        half = memory.values.chunk(2)[rank]
        for gradients in memory.gradients:
            half.add_(gradients.chunk(2)[rank], alpha=-RATE / 2)
        memory.counts[APPLIED + 8 * rank] = number
        memory.wait(APPLIED + 8 * (1 - rank), number)

    def step(number: int) -> None:
        ids, numbers, labels = next(batches)
        model.zero_grad()
        binary_cross_entropy_with_logits(model(ids, numbers), labels).backward()
        torch._foreach_copy_(pushed, [p.grad for p in dense])
        update(number)

    return step


def plain(batches: Iterator[Batch]) -> Callable[[int], None]:
    """Returns what trains a step of the same model in plain torch."""
    model = WideDeep()
    optimizer = torch.optim.SGD(model.parameters(), RATE)

    def step(_: int) -> None:
        ids, numbers, labels = next(batches)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(ids, numbers), labels).backward()
        optimizer.step()

    return step


def main() -> None:
    """Prints what was measured, by batch size; the arguments are the sizes and the number of blocks."""
    *sizes, blocks = map(int, sys.argv[1:-1])  # the last one is --json
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = WideDeep()
    samples = draw(1)
    dense = [p for p in model.parameters() if p is not model.embedding.weight]
    memory = Memory(sum(p.numel() for p in dense))
    with torch.no_grad():
        torch._foreach_copy_(views(memory.values, dense), dense)
    child = os.fork()
    rank = 0 if child else 1
    found: list[dict[str, Any]] = []
    number = met = 0
    for size in sizes:
        alone, together = plain(batches_of(samples, size)), train(rank, memory, model, batches_of(samples, size))
        rates: dict[str, list[float]] = {"plain": [], "bare": []}
        for block in range(blocks + 1):
            for kind, step in (("plain", alone), ("bare", together)):
                met += 1
                memory.counts[MET + 8 * rank] = met
                memory.wait(MET + 8 * (1 - rank), met)
                began = time.perf_counter()
                for _ in range(STEPS if step is together or not rank else 0):
                    number += step is together
                    step(number)
                if block:  # the first one warms up
                    rates[kind].append(size * STEPS / (time.perf_counter() - began))
        found.append({"size": size, **rates})
    if rank:
        os._exit(0)
    os.waitpid(child, 0)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
