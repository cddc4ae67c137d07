"""Training of the recommenders for their tests: small models, random batches, and the script's commands."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from torch import Tensor

from tests.examples.recommenders.example import EXAMPLE, example_module


def alone(*arguments: str) -> list[str]:
    """Returns the command that trains in plain torch."""
    return [sys.executable, "-W", "ignore::UserWarning", str(EXAMPLE / "train.py"), "--torch", *arguments]


def served(*arguments: str) -> list[str]:
    """Returns the command that trains with one server and two workers."""
    launcher = [sys.executable, "-m", "fleet.launch", "--server_num=1", "--worker_num=2", "--log_dir", "log"]
    return [*launcher, str(EXAMPLE / "train.py"), *arguments]


def metrics(output: str) -> dict[str, dict[str, float]]:
    """Returns what a script printed at its end: by metric, the value of the model, of popularity and the best."""
    found = re.findall(r"^TEST ---> (\S+): (.+)$", output, re.MULTILINE)
    return {name: {who: float(value) for who, value in re.findall(r"(\w+) ([\d.]+)", line)} for name, line in found}


def small_net(name: str, table: Any) -> Any:
    """Returns a model of the example, small, with the same dense weights each time."""
    sizes = {
        "dcn": {"rank": 3, "layers": (8, 4)},
        "din": {"attention": 4, "layers": (8, 4)},
        "mmoe": {"experts": 2, "width": 6, "layers": (4,)},
        "dssm": {"layers": (8,), "width": 4},
        "word2vec": {},
        "sasrec": {"length": 6},
    }.get(name, {"layers": (8, 4)})
    return example_module("models").MODELS[name](table, dim=4, **sizes)


def batch_of(name: str, seed: int, size: int = 8) -> dict[str, Tensor]:
    """Returns a random batch with the columns that a model and its loss take."""
    draw = torch.Generator().manual_seed(seed)

    def ids(*shape: int, kinds: int = 12) -> Tensor:
        return torch.randint(1, kinds, shape, generator=draw) * 10**15 - 5 * 10**15

    if name == "word2vec":
        return {"centre": ids(size), "context": ids(size), "negative": ids(size, 3)}
    if name == "sasrec":
        items = ids(size, 6) | 1
        lengths = torch.randint(2, 7, (size,), generator=draw)
        return {"items": items * (torch.arange(6) < lengths[:, None]), "negative": ids(5)}
    batch = {column: ids(size) for column in ("user", "item", "category", "brand")}
    for column, kinds in (("age", 6), ("hour", 24), ("position", 10)):
        batch[column] = torch.randint(0, kinds, (size,), generator=draw)
    lengths = torch.randint(0, 4, (size,), generator=draw)
    starts = lengths.cumsum(0) - lengths
    for column in ("history", "history_category"):
        batch |= {column: ids(int(lengths.sum())) | 1, f"{column}.offsets": starts}
    batch["price"] = 50 * torch.rand(size, generator=draw)
    batch["click"] = (torch.rand(size, generator=draw) < 0.5).float()
    batch["purchase"] = batch["click"] * (torch.rand(size, generator=draw) < 0.5).float()
    if name == "dssm":
        batch |= {"log_q": -3 * torch.rand(size, generator=draw), "negative.log_q": -3 * torch.rand(5, generator=draw)}
        batch |= {f"negative.{column}": ids(5) for column in ("item", "category", "brand")}
        batch["negative.price"] = 50 * torch.rand(5, generator=draw)
    return batch
