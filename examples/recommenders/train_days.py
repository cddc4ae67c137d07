"""Trains two towers day after day, publishes their rows, and names a version after each day.

When readers were taken back to a version, training goes back to its save, lets the readers follow again, and goes on
with the day after it. ``demo.py`` runs this script.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from days import Days
from events import Events
from models.dssm import DSSM
from models.parts import Vectors
from options import make_optimizer, positive_int
from sources import open_data
from tables import Tables

from fleet import fleet, ps

LOOK_STEPS = 10  # how often the workers look for a brake
NEGATIVES = 256
MODEL: dict[str, Any] = {"dim": 16, "layers": [64], "width": 16}
OPTIMIZER = {"name": "adagrad", "lr": 0.02, "table_lr": 0.05}
TABLES = {"all": {"initializer": ["normal", 0.0, 0.05]}}


class Daily:
    """The training of one worker.

    Args:
        args: the options.
        days: what it trains on.
        net: the towers, as built.
        optimizer: of the job.
    """

    def __init__(self, args: argparse.Namespace, days: Days, net: DSSM, optimizer: Any) -> None:
        self.args = args
        self.days = days
        self.net = net
        self.optimizer = optimizer
        self.events = Events(args.folder / "events.jsonl")
        self.reader: ps.Reader | None = None  # from the first version on
        self.tries: Counter[str] = Counter()

    def run(self, model: Any) -> None:
        """Trains each day but the last, which is there to be predicted."""
        day = 0
        while day < self.days.count - 1:
            broken = day == self.args.bad_day and not self.tries[f"day-{day}"]
            self.say("day", day=day, broken=broken)
            batches = self.days.batches(day, self.args.batch_size, NEGATIVES, seed=fleet.worker_index(), broken=broken)
            is_good = self.train(model, batches) and self.passes(self.mark(f"day-{day}"))
            day = 1 + (day if is_good else self.go_back())

    def train(self, model: Any, batches: Iterable[Any]) -> bool:
        """Trains; returns False as soon as readers were taken back to a version."""
        for step, batch in enumerate(batches):
            loss = self.net.loss(model(batch), batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step % LOOK_STEPS == 0 and self.is_braked():
                return False
        return not self.is_braked()

    def passes(self, name: str) -> bool:
        """Returns whether readers follow a version after the guard, if there is one, has scored it."""
        assert self.reader is not None
        while self.args.guarded and self.reader.version is None and not self.is_scored(name):
            time.sleep(0.1)
        self.reader.refresh()
        return not self.is_braked()

    def is_scored(self, name: str) -> bool:
        """Returns whether the guard has come to its conclusion on a version."""
        return any(name in one["versions"] for one in self.events.read("checked"))

    def is_braked(self) -> bool:
        """Returns whether one of the workers has seen the brake; all get the same answer."""
        seen = self.reader is not None and self.reader.version is not None
        return bool(fleet.metrics.max(torch.tensor([float(seen)]))[0] > 0)

    def go_back(self) -> int:
        """Takes training and readers to the version of the brake; returns its day."""
        assert self.reader is not None
        self.reader.refresh()
        version = self.reader.version
        assert version is not None
        assert version.save is not None
        fleet.load_model(version.save)
        self.say("went_back", version=version.name)
        day = int(version.name.split("-")[1])
        self.mark(f"day-{day}")  # on return the folder has these rows: readers may follow
        if fleet.is_first_worker():
            ps.release(self.args.folder / "rows")
        self.say("released")
        fleet.barrier_worker()
        self.reader.refresh()  # now, not when its thread looks: else the next step would see the brake that is off
        return day

    def mark(self, day: str) -> str:
        """Exports both towers and names the rows; returns the name, another one for a day that is marked again."""
        towers = self.args.folder / "towers"
        name = f"{day}-{self.tries[day]}" if self.tries[day] else day
        self.tries[day] += 1
        if fleet.is_first_worker():
            export_towers(self.net, self.days, towers)
        fleet.barrier_worker()
        fleet.mark_version(name, save=self.args.folder / "saves" / name, model=towers)
        self.say("marked", name=name)
        if self.reader is None:
            self.reader = ps.Reader(self.args.folder / "rows").follow()
        return name

    def say(self, kind: str, **facts: Any) -> None:
        """Writes an event, once for all workers."""
        if fleet.is_first_worker():
            self.events.add(kind, **facts)


def export_towers(net: DSSM, days: Days, folder: Path) -> None:
    """Writes a program for users and one for items."""
    batch = next(iter(days.batches(1, 64, 0)))  # on the first day nobody has a history
    for side in ("user", "item"):
        part = Vectors(net, side)
        ps.export(part, ({name: batch[name] for name in part.INPUTS},), folder / side)


def main() -> None:
    """Serves the rows, or trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for rows, towers, saves and events")
    parser.add_argument("--data", required=True, help="the shop, as for train.py")
    parser.add_argument("--batch-size", type=positive_int, default=128, help="of a worker (default: %(default)s)")
    parser.add_argument("--bad-day", type=int, help="a day whose impressions name the wrong items, the first time")
    parser.add_argument("--guarded", action="store_true", help="after each day, wait until watch.py has scored it")
    args = parser.parse_args()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    fleet.init(strategy=strategy)
    ps.publish(args.folder / "rows", every_s=0.5)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    days = Days(open_data(args.data))
    torch.manual_seed(0)
    net = DSSM(Tables(TABLES, local=False), **MODEL)
    optimizer = fleet.distributed_optimizer(make_optimizer(OPTIMIZER, net), strategy)
    model = fleet.distributed_model(net)
    fleet.init_worker()
    Daily(args, days, net, optimizer).run(model)
    fleet.stop_worker()


if __name__ == "__main__":
    main()
