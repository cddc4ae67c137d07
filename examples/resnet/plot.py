"""Draws the history of a training run: ``python plot.py HISTORY.jsonl PICTURE.png``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

BLUE, ORANGE = "#1f5fa8", "#d1621c"


def read_history(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a history file in the order of their epochs.

    A run that was killed may have written an epoch that it then trained again; the later record wins.

    Raises:
        ValueError: a line is not a record, or there is none; the message names file and line.
    """
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            records[record["epoch"]] = {name: record[name] for name in ("epoch", "loss", "acc1", "test_acc1")}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{str(path)!r}, line {number}: not a record of a training script ({error!r}).") from error
    if not records:
        raise ValueError(f"{str(path)!r} holds no epoch. Train with --history {path} first.")
    return [records[epoch] for epoch in sorted(records)]


def draw(records: list[dict[str, Any]], picture: Path, title: str) -> None:
    """Writes a picture with two panels over the epochs: the training loss, and both accuracies."""
    epochs = [record["epoch"] + 1 for record in records]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=12, color="#222222")

    draw_line(left, epochs, [record["loss"] for record in records], BLUE, "training")
    left.set(title="Cross-entropy loss", ylabel="mean loss of the epoch", yscale="log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    left.yaxis.set_minor_locator(NullLocator())

    draw_line(right, epochs, [record["acc1"] for record in records], BLUE, "training images")
    draw_line(right, epochs, [record["test_acc1"] for record in records], ORANGE, "test images")
    right.set(ylabel="images classified correctly", ylim=(0, 1.02))
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    right.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.08))
    right.set_title(f"Top-1 accuracy (test: {records[-1]['test_acc1']:.1%} at the end)")

    for axes in (left, right):
        axes.set(xlabel="epochs completed", xlim=(0.5, epochs[-1] + 0.5))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    plt.close(figure)


def draw_line(axes: Axes, epochs: list[int], values: list[float], colour: str, label: str) -> None:
    """Adds one curve, with a point per epoch."""
    axes.plot(epochs, values, color=colour, label=label, linewidth=1.8, marker="o", markersize=4)


def main() -> None:
    """Reads the history that the command line names and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("history", type=Path, help="file that a training script wrote with --history")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("--title", default="ResNet training", help="(default: %(default)s)")
    args = parser.parse_args()
    draw(read_history(args.history), args.picture, args.title)
    print(f"Wrote {args.picture}")


if __name__ == "__main__":
    main()
