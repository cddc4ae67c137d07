"""What a training script shows and writes: lines, and a history file."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

Batch = TypeVar("Batch")


class Report:
    """Prints progress and writes the history; ``active=False`` makes it silent.

    Args:
        args: the options; ``batch_size``, ``length``, ``steps``, ``log_every`` and ``history`` are used.
        workers: how many processes train, for the tokens of one of them.
        active: whether this process prints and writes.
    """

    def __init__(self, args: argparse.Namespace, workers: int = 1, *, active: bool = True) -> None:
        self.args, self.workers, self.active = args, workers, active
        self.history = Path(args.history) if args.history and active else None
        if self.history is not None:
            self.history.parent.mkdir(parents=True, exist_ok=True)
            self.history.write_text("")
        self.step = 0
        self.seconds = 0.0  # of the steps after the first, which is slower than the rest
        self.started_s = 0.0

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches and takes the time."""
        for self.step, batch in enumerate(batches, start=1):
            self.started_s = time.monotonic()
            yield batch

    def add(self, loss: float) -> None:
        """Ends a step: adds a line to the history, and prints one every ``log_every`` steps."""
        seconds = time.monotonic() - self.started_s
        self.seconds += seconds if self.step > 1 else 0.0
        if self.step % self.args.log_every == 0 or self.step in (1, self.args.steps):
            self.line(f"[Step {self.step}/{self.args.steps}] loss: {loss:.5f}{self._speed()}")
        if self.history is not None:
            record = {"step": self.step, "loss": loss, "seconds": round(seconds, 5)}
            record |= {"tokens": self.args.batch_size * self.args.length, "workers": self.workers}
            with self.history.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def line(self, text: str) -> None:
        """Prints a line at once."""
        if self.active:
            print(text, flush=True)

    def _speed(self) -> str:
        if self.step < 2:
            return ""
        speed = (self.step - 1) * self.args.batch_size * self.args.length / self.seconds
        each = f", {speed / self.workers:.0f} per worker" if self.workers > 1 else ""
        return f", {speed:.0f} tokens/s{each}"
