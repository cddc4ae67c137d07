"""Draws the results of all models: ``python plot.py HISTORY.jsonl PICTURE.png``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Results = dict[str, dict[str, dict[str, float]]]  # metric of a model -> run -> who -> value

MARKS = {"torch": "o", "sync": "x", "hybrid": "+", "async": "^", "geo": "s", "torch, geo's settings": "o"}
COLOURS = {
    "torch": "#222222",
    "sync": "#1f5fa8",
    "hybrid": "#3c8d40",
    "async": "#d1621c",
    "geo": "#8a3fa0",
    "torch, geo's settings": "#b9a5c4",
}
GREY = "#999999"


def read_history(path: Path) -> Results:
    """Returns the last result of each model and run, by metric.

    Raises:
        ValueError: a line is not a record, or there is none; the message names file and line.
    """
    found: Results = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            run = "torch, geo's settings" if record.get("settings_of") == "geo" else record["mode"]
            if run not in MARKS:
                raise ValueError(f"no mode {run!r}")
            for metric, values in record.items():
                if isinstance(values, dict):
                    found.setdefault(f"{record['model']} {metric}", {})[run] = values
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{str(path)!r}, line {number}: not a record of train.py ({error!r}).") from error
    if not found:
        raise ValueError(f"{str(path)!r} holds no result. Train with --history {path} first.")
    return found


def draw(found: Results, picture: Path) -> None:
    """Writes a picture: AUC of clicks and of purchases, and recall of the models that rank all items."""
    panels = {"auc_click": "AUC of clicks", "auc_purchase": "AUC of purchases", "recall": "Recall among all items"}
    rows = {part: [name for name in found if name.split()[1].startswith(part)] for part in panels}
    shown = {part: names for part, names in rows.items() if names}
    widths = [1 + len(names) for names in shown.values()]
    figure, axes = plt.subplots(
        1, len(shown), figsize=(12, 4.2), dpi=150, layout="constrained", width_ratios=widths, squeeze=False
    )
    for place, (part, names) in zip(axes[0], shown.items(), strict=True):
        draw_panel(place, found, names)
        place.set_title(panels[part], fontsize=10)
    entries: dict[str, Any] = {}
    for place in axes[0]:
        handles, labels = place.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=len(entries), frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    plt.close(figure)


def draw_panel(axes: Axes, found: Results, names: list[str]) -> None:
    """Draws a column for each model: its runs as marks, the best possible and popularity as lines."""
    for column, name in enumerate(names):
        runs = found[name]
        any_run = next(iter(runs.values()))
        styles: tuple[tuple[str, Literal["-", ":"]], ...] = (("best", "-"), ("popularity", ":"))
        for who, style in styles:
            if who in any_run:
                label = {"best": "best possible", "popularity": "popularity alone"}[who]
                axes.hlines(any_run[who], column - 0.4, column + 0.4, GREY, linestyles=style, label=label)
        for place, run in enumerate(MARKS):
            if run not in runs:
                continue
            (mark,) = axes.plot(
                column + 0.11 * (place - 2.5),
                runs[run]["model"],
                MARKS[run],
                color=COLOURS[run],
                markersize=6,
                label=run,
            )
            if MARKS[run] not in "x+":
                mark.set_markerfacecolor("none")
    axes.set_xticks(range(len(names)), [name.split()[0] for name in names], rotation=30)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Reads the history that the command line names and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("history", type=Path, help="file that train.py wrote with --history")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    args = parser.parse_args()
    draw(read_history(args.history), args.picture)
    print(f"Wrote {args.picture}")


if __name__ == "__main__":
    main()
