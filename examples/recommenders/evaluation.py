"""How well a model ranks the test day, beside the best that any model can and beside popularity."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from catalogue import Catalogue
from feeds import held_out, inputs_of, moved
from torch import Tensor

import fleet

BINS = 1 << 16
TOP = 50


@torch.no_grad()
def evaluate(net: Any, folder: Path, device: torch.device) -> dict[str, dict[str, float]]:
    """Returns, by metric, the values of the model, and of popularity and the best possible where they are known.

    Every worker calls it with its share of the samples; all get the same values.

    Args:
        net: the model, as built.
        folder: of a shop.
        device: where the model is.
    """
    net.eval()
    catalogue = Catalogue.read(folder) if (folder / "items.parquet").exists() else None
    ranks = hasattr(net, "of_users")
    tasks = ("click",) if ranks else net.TASKS
    stats: dict[tuple[str, str], fleet.metrics.StatAuc] = defaultdict(lambda: fleet.metrics.StatAuc(BINS))
    batches: list[dict[str, Tensor]] = []
    for batch in held_out(folder, inputs_of(net)):
        there = moved(batch, device)
        outputs = {"click": (net.of_users(there) * net.of_items(there)).sum(1)} if ranks else net(there)
        for task in tasks:
            stats[task, "model"].update(torch.sigmoid(outputs[task]), batch[task])
            if catalogue is not None and "item" in batch:
                stats[task, "popularity"].update(catalogue.click_rate(batch["item"]), batch[task])
            if "p_click" in batch:  # that of a purchase is given a click
                truth = batch["p_click"] if task == "click" else batch["p_click"] * batch["p_purchase"]
                stats[task, "best"].update(truth, batch[task])
        batches.append(batch)
    found: dict[str, dict[str, float]] = {f"auc_{task}": {} for task in tasks}
    for (task, who), stat in stats.items():
        found[f"auc_{task}"][who] = round(stat.value(), 6)
    if ranks and catalogue is not None:
        found[f"recall@{TOP}"] = recall(net, catalogue, batches, device)
    return found


def recall(
    net: Any, catalogue: Catalogue, batches: Iterable[dict[str, Tensor]], device: torch.device
) -> dict[str, float]:
    """Returns the share of clicks of the test day whose item is among the first of all items on sale.

    Args:
        net: a model that gives vectors of users and items.
        catalogue: the items.
        batches: of the test day.
        device: where the model is.
    """
    places = catalogue.on_sale(catalogue.last_day)
    columns = catalogue.columns(places)
    items, vectors = columns["item"], net.of_items(moved(columns, device)).cpu()
    top = min(TOP, len(items))
    popular = items[catalogue.clicked(places).topk(top).indices]
    hits, popular_hits, clicks = 0, 0, 0
    for batch in batches:
        rows = batch["click"] == 1
        scores = net.of_users(moved(batch, device)).cpu()[rows] @ vectors.T
        wanted = batch["item"][rows]
        hits += int((items[scores.topk(top).indices] == wanted[:, None]).sum())
        popular_hits += int(torch.isin(wanted, popular).sum())
        clicks += len(wanted)
    sums = fleet.metrics.sum(np.array([hits, popular_hits, clicks]))
    return {"model": round(float(sums[0] / sums[2]), 6), "popularity": round(float(sums[1] / sums[2]), 6)}
