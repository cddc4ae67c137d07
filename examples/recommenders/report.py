"""What the training script prints and writes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Report:
    """Prints the mean loss of each pass, and the metrics at the end; ``active=False`` makes it silent.

    Args:
        args: the options.
        active: whether this process prints and writes.
        total: returns the sums over all workers; without it, this process has all steps.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        *,
        active: bool = True,
        total: Callable[[list[float]], list[float]] = list,
    ) -> None:
        self.args = args
        self.active = active
        self.total = total
        self.steps = 0
        self.sum, self.count = 0.0, 0
        self.started_s = time.monotonic()

    def add(self, loss: float) -> None:
        """Counts a step."""
        self.sum += loss
        self.count += 1
        self.steps += 1

    def end_pass(self, number: int) -> None:
        """Prints the mean loss since the last call, over the steps of all workers; every worker calls it.

        Raises:
            ValueError: the pass had no batch.
        """
        losses, steps = self.total([self.sum, float(self.count)])
        if not steps:
            raise ValueError("the pass had no batch: there are fewer rows than workers.")
        self.line(f"TRAIN ---> pass: {number} loss: {losses / steps:.6f}")
        self.sum, self.count = 0.0, 0

    def end(self, found: dict[str, dict[str, float]]) -> None:
        """Prints the metrics, and appends them to the history."""
        seconds = time.monotonic() - self.started_s
        for metric, values in found.items():
            self.line(f"TEST ---> {metric}: " + ", ".join(f"{who} {value:.6f}" for who, value in values.items()))
        if self.active and self.args.history:
            record: dict[str, Any] = {
                "model": self.args.model,
                "mode": "torch" if self.args.torch else self.args.mode,
                "seed": self.args.seed,
                "steps": self.steps,
                "seconds": round(seconds, 1),
                **found,
            }
            if self.args.torch:
                record["settings_of"] = self.args.mode
            path = Path(self.args.history)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def line(self, text: str) -> None:
        """Prints a line and flushes it."""
        if self.active:
            print(text, flush=True)
