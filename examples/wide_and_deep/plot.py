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
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE = "#1f5fa8", "#d1621c"


def read_history(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a history file.

    Raises:
        ValueError: a line is not a record, or there is none; the message names file and line.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            records.append({name: record[name] for name in ("pass", "loss", "auc")})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{str(path)!r}, line {number}: not a record of a training script ({error!r}).") from error
    if not records:
        raise ValueError(f"{str(path)!r} holds no pass. Train with --history {path} first.")
    return records


def draw(records: list[dict[str, Any]], picture: Path, title: str) -> None:
    """Writes a picture with two panels over the passes: the training loss, and the AUC on the test samples."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.8), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=12, color="#222222")
    draw_line(left, records, "loss", BLUE)
    left.set(title="Cross-entropy loss", ylabel="mean loss of the pass")
    draw_line(right, records, "auc", ORANGE)
    right.set(title=f"AUC on the test samples ({records[-1]['auc']:.4f} at the end)", ylabel="AUC")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    plt.close(figure)


def draw_line(axes: Axes, records: list[dict[str, Any]], name: str, colour: str) -> None:
    """Draws one value of all records, with a point per pass."""
    passes = [record["pass"] + 1 for record in records]
    axes.plot(passes, [record[name] for record in records], color=colour, linewidth=1.8, marker="o", markersize=4)
    axes.set(xlabel="passes completed", xlim=(0.5, passes[-1] + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Reads the history that the command line names and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("history", type=Path, help="file that a training script wrote with --history")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("--title", default="Late flights", help="(default: %(default)s)")
    args = parser.parse_args()
    draw(read_history(args.history), args.picture, args.title)
    print(f"Wrote {args.picture}")


if __name__ == "__main__":
    main()
