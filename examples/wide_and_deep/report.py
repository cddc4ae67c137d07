"""What a training script shows and writes: a line per pass, and a history file."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from data import Batch
from torch import Tensor
from torch.utils.data import DataLoader


class Report:
    """Prints progress and keeps the mean loss of the current pass; ``active=False`` makes it silent.

    Args:
        args: the options; ``epochs``, ``max_batches`` and ``history`` are used.
        active: whether this process prints and writes.
        log: receives the loss of each batch and the AUC of each test, by name, and the steps of all passes.
    """

    def __init__(
        self, args: argparse.Namespace, *, active: bool = True, log: Callable[..., object] | None = None
    ) -> None:
        self.epochs, self.max_batches = args.epochs, args.max_batches
        self.active, self.total_steps = active, 0
        self.log = log or (lambda values, **facts: None)
        self.history = Path(args.history) if args.history and active else None
        if self.history is not None:
            self.history.parent.mkdir(parents=True, exist_ok=True)
            self.history.write_text("")
        self.sum, self.samples, self.started_s = 0.0, 0, 0.0

    def batches(self, loader: DataLoader[Batch]) -> Iterator[Batch]:
        """Starts a pass and yields its batches; raises ValueError when there is none."""
        self.sum, self.samples, self.started_s = 0.0, 0, time.monotonic()
        if not len(loader):
            raise ValueError("--batch-size is more than the training samples of one process; lower it.")
        self.total_steps = self.epochs * min(len(loader), self.max_batches or len(loader))
        yield from islice(loader, self.max_batches)

    def add_batch(self, loss: Tensor, samples: int) -> None:
        """Adds a batch to the mean."""
        self.log({"loss": loss}, total_steps=self.total_steps)
        self.sum += loss.item() * samples
        self.samples += samples

    def end_pass(self, number: int) -> None:
        """Prints the mean loss of this process."""
        self.line(f"TRAIN ---> pass: {number} loss: {self.sum / self.samples:.6f}")

    def end_test(self, number: int, auc: float, seconds: float) -> None:
        """Prints the AUC, and writes the pass to the history."""
        loss = self.sum / self.samples
        self.log({"auc": auc})
        self.line(f"TEST ---> pass: {number} AUC: {auc:.6f}")
        if self.history is not None:
            record = {"pass": number, "loss": loss, "auc": auc, "samples": self.samples, "seconds": round(seconds, 3)}
            with self.history.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def seconds(self) -> float:
        """Returns the time since the pass began."""
        return time.monotonic() - self.started_s

    def line(self, text: str) -> None:
        """Prints a line and flushes it."""
        if self.active:
            print(text, flush=True)
