"""Draws the histories of training runs: ``python plot.py PICTURE.png NAME=HISTORY.jsonl ...``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt

COLOURS = ("#1f5fa8", "#d1621c", "#2f8f4e", "#8a4fa3", "#8c6d1f", "#444444")

Record = dict[str, Any]


def read_history(path: Path) -> list[Record]:
    """Returns the records of a history file, one per step.

    Raises:
        ValueError: a line is not a record, or there is none; the message names file and line.
    """
    records: list[Record] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            records.append({name: record[name] for name in ("step", "loss", "seconds", "tokens", "workers")})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{str(path)!r}, line {number}: not a record of a training script ({error!r}).") from error
    if not records:
        raise ValueError(f"{str(path)!r} holds no step. Train with --history {path} first.")
    return records


def speed(records: list[Record]) -> float:
    """Returns the tokens per second of all workers; the first step, which is slower, does not count."""
    counted = records[1:] or records
    return float(sum(r["tokens"] for r in counted) / max(1e-9, sum(r["seconds"] for r in counted)))


def draw(runs: dict[str, list[Record]], picture: Path, title: str) -> None:
    """Writes a picture with two panels: the loss of each run over the steps, and its tokens per second."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 3.8), dpi=150, layout="constrained", width_ratios=(1.6, 1.0)
    )
    figure.suptitle(title, fontsize=12, color="#222222")
    for place, (name, records) in enumerate(runs.items()):
        # Runs that train alike lie on each other: the first one is broad and pale, those on top are thin.
        style: dict[str, Any] = {"linewidth": 1.4} if place or len(runs) == 1 else {"linewidth": 5.0, "alpha": 0.35}
        steps, losses = zip(*((r["step"], r["loss"]) for r in records), strict=True)
        left.plot(steps, losses, color=COLOURS[place % len(COLOURS)], label=name, **style)
    left.set(title="Cross-entropy per byte", xlabel="steps", ylabel="loss of the step", xlim=(0, None))
    left.legend(frameon=False)

    for place, (name, records) in enumerate(runs.items()):
        found, workers = speed(records), records[0]["workers"]
        right.barh(name, found, color=COLOURS[place % len(COLOURS)], height=0.55)
        each = f"\n{found / workers:,.0f} each" if workers > 1 else ""
        right.annotate(f"{found:,.0f}{each}", (found, name), (4, 0), textcoords="offset points", va="center")
    right.invert_yaxis()
    right.set(title="Tokens per second", ylim=(len(runs) - 0.4, -0.6))
    right.set_xlim(0, 1.45 * max(speed(records) for records in runs.values()))
    right.set_xticks([])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    right.spines["bottom"].set_visible(False)
    left.grid(axis="y", color="#dddddd", linewidth=0.8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    plt.close(figure)


def run_named(text: str) -> tuple[str, Path]:
    """Returns name and path of ``NAME=FILE``; without a name the file's stem is the name."""
    name, separator, path = text.rpartition("=")
    return (name if separator else Path(path).stem), Path(path)


def main() -> None:
    """Reads the histories that the command line names and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="PNG file to write")
    parser.add_argument("runs", type=run_named, nargs="+", metavar="NAME=FILE", help="a file from --history")
    parser.add_argument("--title", default="A small GPT", help="(default: %(default)s)")
    args = parser.parse_args()
    draw({name: read_history(path) for name, path in args.runs}, args.picture, args.title)
    print(f"Wrote {args.picture}")


if __name__ == "__main__":
    main()
