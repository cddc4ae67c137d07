"""Draws what each stage of a pipeline does over time, from the order in which the library runs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file, no window
import matplotlib.pyplot as plt

from fleet.strategies.pipeline.order import MicroStep, plan_order

STAGES, MICRO_BATCHES = 4, 8
COLORS = {("f", 0): "#4c78a8", ("f", 1): "#9ecae9", ("b", 0): "#f58518", ("b", 1): "#ffbf79"}
Box = tuple[int, MicroStep, float, float]  # stage, what it does, start and duration


def timed(orders: Sequence[Sequence[MicroStep]], num_chunks: int) -> list[Box]:
    """Returns when each stage runs each step: a forward takes 1 / chunks, a backward twice that, transfers nothing."""
    ends: dict[tuple[str, int, int], float] = {}  # by what, part of the model and micro-batch
    free, at, boxes = [0.0] * len(orders), [0] * len(orders), []
    last_part = len(orders) * num_chunks - 1
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                step = order[at[stage]]
                part = step.chunk * len(orders) + stage
                before = ("f", part - 1, step.micro) if step.what == "f" else ("b", part + 1, step.micro)
                if step == MicroStep("b", last_part // len(orders), step.micro) and part == last_part:
                    before = ("f", part, step.micro)
                waits = part > 0 or step.what == "b"
                if waits and before not in ends:
                    break
                start = max(free[stage], ends[before] if waits else 0.0)
                length = (1 if step.what == "f" else 2) / num_chunks
                free[stage] = ends[step.what, part, step.micro] = start + length
                boxes.append((stage, step, start, length))
                at[stage] += 1
    return boxes


def plot_orders(path: Path) -> None:
    """Writes the picture: 1F1B above, two chunks per stage below, on one axis of time."""
    figure, panels = plt.subplots(2, 1, figsize=(12, 4.8), sharex=True, layout="constrained")
    for panel, chunks in zip(panels, (1, 2), strict=True):
        orders = [plan_order(STAGES, stage, MICRO_BATCHES, num_chunks=chunks) for stage in range(STAGES)]
        boxes = timed(orders, chunks)
        whole = max(start + length for _, _, start, length in boxes)
        idle = 1 - 3 * MICRO_BATCHES / whole
        title = "1F1B" if chunks == 1 else f"interleaved, {chunks} chunks per stage"
        panel.set_title(f"{title}: stages wait {idle:.1%} of a step", loc="left", fontsize=11)
        draw(panel, boxes)
    panels[1].set_xlabel("time, in forward passes of a stage; a backward takes two")
    kinds = {"forward": ("f", 0), "forward, second chunk": ("f", 1), "backward": ("b", 0)}
    kinds["backward, second chunk"] = ("b", 1)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[kind]) for kind in kinds.values()]
    figure.legend(handles, kinds, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def draw(panel: Any, boxes: Sequence[Box]) -> None:
    """Draws a box with the number of the micro-batch for each step."""
    for stage, step, start, length in boxes:
        kind = step.what, step.chunk
        panel.barh(stage, length, 0.82, left=start, color=COLORS[kind], edgecolor="white", linewidth=0.8)
        color = "white" if kind == ("f", 0) else "black"
        panel.text(start + length / 2, stage, str(step.micro), ha="center", va="center", fontsize=7, color=color)
    panel.set_yticks(range(STAGES), [f"stage {stage}" for stage in range(STAGES)])
    panel.invert_yaxis()
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
