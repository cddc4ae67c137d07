"""Watches the rows that a job publishes: scores them on clicks it has not seen, and brakes when they get worse.

The score is recall@50: the share of today's clicks whose item is among the 50 nearest of those on sale. Today is the
day after the one in training. ``demo.py`` runs this script.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from days import Batch, Days
from events import Events
from models.dssm import DSSM, ITEM_COLUMNS
from sources import open_data
from torch import Tensor

from fleet import ps
from fleet.errors import FleetError

TOP = 50


class Recall:
    """The score of rows, by both towers and the clicks of a day.

    Args:
        towers: the folder of both programs.
        days: the shop.
        clicks: how many of a day are taken.
        events: where each score is written.
    """

    def __init__(self, towers: Path, days: Days, clicks: int, events: Events) -> None:
        self.towers = towers
        self.days = days
        self.clicks = clicks
        self.events = events

    def __call__(self, reader: ps.Reader) -> float:
        """Returns the recall; nothing is known before the first version."""
        if not reader.versions:
            return 0.0
        last = int(reader.versions[-1].name.split("-")[1])
        today = min(last + 2, self.days.count - 1)
        score = recall(self.towers, reader, self.days.clicks(today, self.clicks), self.days.on_sale(today))
        self.events.add("score", value=score, today=today, version=reader.version and reader.version.name)
        return score


def recall(towers: Path, reader: ps.Reader, clicks: Batch, items: Batch) -> float:
    """Returns the share of clicks whose item is among the nearest of ``items``."""
    users = ps.Predictor(towers / "user", reader)({name: clicks[name] for name in DSSM.USER_INPUTS})
    vectors = ps.Predictor(towers / "item", reader)({name: items[name] for name in ITEM_COLUMNS})
    nearest: Tensor = items["item"][(users @ vectors.T).topk(TOP).indices]
    return float((nearest == clicks["item"][:, None]).any(1).float().mean())


def main() -> None:
    """Watches until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="as for train_days.py")
    parser.add_argument("--data", required=True, help="the shop, as for train.py")
    parser.add_argument("--drop", type=float, default=0.03, help="what recall may lose (default: %(default)s)")
    parser.add_argument("--clicks", type=int, default=1000, help="of a day, to score on (default: %(default)s)")
    parser.add_argument("--every-s", type=float, default=1.0, help="seconds between scores (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    events = Events(args.folder / "events.jsonl")

    def tell(version: ps.Version, value: float, best: float) -> None:
        events.add("brake", version=version.name, value=value, best=best)

    metric = Recall(args.folder / "towers", Days(open_data(args.data)), args.clicks, events)
    guard = ps.guard(metric, args.drop, args.folder / "rows", on_roll_back=tell)
    print("watching", flush=True)
    while True:
        try:
            guard.check()
            events.add("checked", versions=list(guard.scores))
        except FleetError as error:
            print(f"the next round tries again: {error}", file=sys.stderr, flush=True)
        time.sleep(args.every_s)


if __name__ == "__main__":
    main()
