"""What a training script shows and writes: lines (or a progress bar on a terminal), and a history file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from evaluation import hits_at
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader


class Report:
    """Prints progress and keeps the sums of the current epoch; ``active=False`` makes it silent.

    Args:
        args: the options; ``log_every``, ``max_batches``, ``epochs`` and ``history`` are used.
        active: whether this process prints and writes. The sums are kept either way.
        resume: append to the history file instead of overwriting it.
    """

    def __init__(self, args: argparse.Namespace, *, active: bool = True, resume: bool = False) -> None:
        self.args = args
        self.active = active
        self.history = Path(args.history) if args.history and active else None
        if self.history is not None:
            self.history.parent.mkdir(parents=True, exist_ok=True)
            self.history.open("a" if resume else "w").close()
        self.epoch = 0
        self.sums = np.zeros(4)
        self.started_s = 0.0

    def num_batches(self, loader: DataLoader[Any]) -> int:
        """Returns the batches of one epoch; raises ValueError when the loader holds none."""
        found = min(len(loader), self.args.max_batches or len(loader))
        if not found:
            raise ValueError(
                f"--batch-size is {self.args.batch_size}, more than the training images of one process; lower it."
            )
        return found

    def batches(self, loader: DataLoader[Any], epoch: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Starts an epoch and yields (index, batch); a terminal shows a progress bar."""
        self.epoch, self.started_s = epoch, time.monotonic()
        self.sums = np.zeros(4)
        found: Iterable[list[Tensor]] = islice(loader, self.num_batches(loader))
        if self._on_terminal():
            from tqdm import tqdm

            label = f"Epoch {epoch + 1}/{self.args.epochs}"
            found = tqdm(found, label, self.num_batches(loader), leave=False, unit="batch", file=sys.stdout)
        yield from enumerate(found)

    def add_batch(self, index: int, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Adds one batch to the sums and prints its line every ``log_every`` batches."""
        count = len(labels)
        top1, top5 = (int(hits_at(logits, labels, k).sum()) for k in (1, 5))
        self.sums += [loss.item() * count, top1, top5, count]
        if index % self.args.log_every == 0:
            values = (self.epoch, index, loss.item(), top1 / count, top5 / count)
            self.line("[Epoch %d, batch %d] loss: %.5f, acc1: %.5f, acc5: %.5f" % values)  # noqa: UP031

    def add_update(self, update: int, num_updates: int, loss: float, workers: int) -> None:
        """Writes the loss of an update to the history, and prints its line every ``log_every`` updates."""
        if update % self.args.log_every == 0:
            self.line(f"[Update {update}/{num_updates}] loss: {loss:.9f}, {workers} worker(s)")
        if self.history is not None:
            with self.history.open("a") as file:
                file.write(json.dumps({"update": update, "loss": loss, "workers": workers}) + "\n")

    def end_epoch(self, sums: NDArray[np.float64], test_accuracy: float, lr: float) -> dict[str, float]:
        """Prints the epoch's means and writes them to the history; returns loss and accuracy by name.

        ``sums`` are loss, hits at 1 and 5, and images.
        """
        loss, acc1, acc5 = (sums[:3] / sums[3]).tolist()
        seconds = time.monotonic() - self.started_s
        self.line(
            f"[Epoch {self.epoch}] mean loss: {loss:.5f}, acc1: {acc1:.5f}, acc5: {acc5:.5f}, "
            f"test acc1: {test_accuracy:.5f}, {seconds:.1f} s"
        )
        if self.history is not None:
            record = {"epoch": self.epoch, "loss": loss, "acc1": acc1, "acc5": acc5}
            record |= {"test_acc1": test_accuracy, "images": int(sums[3]), "lr": lr, "seconds": round(seconds, 3)}
            with self.history.open("a") as file:
                file.write(json.dumps(record) + "\n")
        return {"loss": loss, "test_acc1": test_accuracy}

    def line(self, text: str) -> None:
        """Prints a line above the progress bar, if there is one."""
        if not self.active:
            return
        if self._on_terminal():
            from tqdm import tqdm

            tqdm.write(text)
        else:
            print(text, flush=True)

    def _on_terminal(self) -> bool:
        return self.active and sys.stdout.isatty()
