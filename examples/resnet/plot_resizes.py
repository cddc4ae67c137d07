"""Draws a run that was resized on the undisturbed one: ``python plot_resizes.py ONE.jsonl RESIZED.jsonl PICTURE.png``.

Both files are those that ``train_fleet_reproducible.py`` writes with ``--history``.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

BLUE, ORANGE = "#1f5fa8", "#d1621c"
BANDS = ("#eef3f9", "#ffffff")

Losses = dict[int, tuple[float, int]]  # by update: the loss, and the number of workers


def read_updates(path: Path) -> tuple[Losses, int]:
    """Returns the losses of a history, and how many updates were made again after a kill.

    Raises:
        ValueError: a line is not a record, there is none, or an update that was made again has another loss.
    """
    found: Losses = {}
    again = 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            update, loss, workers = record["update"], record["loss"], record["workers"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{str(path)!r}, line {number}: not a record of a training script ({error!r}).") from error
        if update in found:
            again += 1
            if found[update][0] != loss:
                raise ValueError(
                    f"{str(path)!r}, line {number}: update {update} was made again, and its loss is {loss!r}; it was "
                    f"{found[update][0]!r}."
                )
        found[update] = loss, workers
    if not found:
        raise ValueError(f"{str(path)!r} holds no update. Train with --history {path} first.")
    return dict(sorted(found.items())), again


def stages(run: Losses) -> list[tuple[int, int, int]]:
    """Returns the parts of a run with one number of workers: the first update, the last one, and that number."""
    parts = []
    for workers, updates in groupby(run, lambda update: run[update][1]):
        members = list(updates)
        parts.append((members[0], members[-1], workers))
    return parts


def differences(one: Losses, resized: Losses) -> list[float]:
    """Returns the difference of the losses of each update; raises ValueError where the runs have other updates."""
    if one.keys() != resized.keys():
        raise ValueError(f"The runs have {len(one)} and {len(resized)} updates; compare runs of one length.")
    return [resized[update][0] - one[update][0] for update in one]


def draw(one: Losses, resized: Losses, picture: Path) -> None:
    """Writes a picture with two panels over the updates: both losses, and their difference."""
    difference = differences(one, resized)
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9.6, 5.0), dpi=150, layout="constrained", height_ratios=(3.2, 1.0), sharex=True
    )
    updates = list(one)
    upper.plot(updates, [loss for loss, _ in one.values()], color=BLUE, alpha=0.35, linewidth=6.0, label="undisturbed")
    upper.plot(updates, [loss for loss, _ in resized.values()], color=ORANGE, linewidth=1.3, label="resized")
    upper.set(title="Loss of each update", ylabel="cross-entropy", yscale="log")
    upper.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    upper.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    upper.yaxis.set_minor_locator(NullLocator())
    upper.margins(y=0.15)  # room for the names of the bands
    upper.legend(frameon=False, loc="lower left")

    largest = max(map(abs, difference))
    lower.plot(updates, difference, color=ORANGE, linewidth=1.3)
    said = f"at most {largest:g}" if largest else "0 in every update"
    lower.set(title=f"Resized minus undisturbed: {said}", xlabel="updates")
    lower.set(xlim=(updates[0] - 0.5, updates[-1] + 0.5), ylim=(-1e-6, 1e-6) if largest < 1e-6 else None)
    for axes in (upper, lower):
        mark_stages(axes, stages(resized), named=axes is upper)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
    plt.close(figure)


def mark_stages(axes: Axes, parts: list[tuple[int, int, int]], *, named: bool) -> None:
    """Gives each number of workers a band, with its name at the top."""
    for place, (first, last, workers) in enumerate(parts):
        axes.axvspan(first - 0.5, last + 0.5, color=BANDS[place % len(BANDS)], zorder=0)
        if named:
            name = f"{workers} worker" + "s" * (workers > 1)
            at = ((first + last) / 2, 0.97)
            axes.annotate(name, at, xycoords=("data", "axes fraction"), ha="center", va="top", fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Reads the histories that the command line names and writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=Path, help="history of the undisturbed run")
    parser.add_argument("resized", type=Path, help="history of the run that was resized")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    args = parser.parse_args()
    draw(read_updates(args.one)[0], read_updates(args.resized)[0], args.picture)
    print(f"Wrote {args.picture}")


if __name__ == "__main__":
    main()
