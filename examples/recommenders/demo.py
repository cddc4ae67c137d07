"""Trains, serves, retrieves, drops a bad version and brakes; then writes a page about it.

Six programs that know each other by folders and HTTP: a job of a server and a worker (``train_days.py``), two replicas
of a service (``retrieve.py``), a guard (``watch.py``), and this one, which asks both replicas all the time. On one day
the impressions name the wrong items. The guard sees that today's clicks are found less often and takes all readers back
to the best version; training goes back to its save, and on with the day as it should have been.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import torch
from days import Batch, Days
from events import Events
from models.dssm import DSSM
from options import positive_int
from other_example import module_of_wide_and_deep
from page import write_page
from sources import open_data
from story import REPLICAS, Story

HERE = Path(__file__).parent
processes = module_of_wide_and_deep("processes")

SHOP = "simulated:users=5000,items=20000,days=7,impressions=560000"
TOP = 50
TICK_S = 0.1  # between requests to a replica
CLICKS_S = 1.0  # between requests for many users
PORTRAITS = 5


class Visitors:
    """Asks the replicas as users do, and writes what comes back.

    Args:
        urls: of the replicas.
        days: the shop.
        events: of the demonstration.
        clicks: of a day, asked for in one request.
    """

    def __init__(self, urls: list[str], days: Days, events: Events, clicks: int) -> None:
        self.urls = urls
        self.days = days
        self.events = events
        self.clicks = clicks
        self.today = -1
        self.batch: Batch = {}
        self.asked = 0
        self.clicks_due_s = 0.0

    def tick(self) -> None:
        """Asks each replica for one user, and in turn for the users of today's clicks."""
        training = int(self.events.read("day")[-1]["day"])
        if training + 1 != self.today:
            self.today = training + 1
            self.batch = self.days.clicks(self.today, self.clicks)
        for replica, url in zip(REPLICAS, self.urls, strict=True):
            place = self.asked % len(self.batch["user"])
            self.asked += 1
            began = time.perf_counter()
            answer = ask(url, [some(self.batch, place, place + 1)], 10)
            took_ms = 1000 * (time.perf_counter() - began)
            facts = {name: answer[name] for name in ("step", "age_s", "version")}
            self.events.add("answer", replica=replica, ms=round(took_ms, 2), **facts)
        if time.monotonic() >= self.clicks_due_s:
            self.clicks_due_s = time.monotonic() + CLICKS_S
            turn = self.asked // len(REPLICAS) % len(REPLICAS)
            answer = ask(self.urls[turn], [self.batch], TOP, recall=True)
            wanted = zip(answer["items"], self.batch["item"].tolist(), strict=True)
            hits = sum(item in items for items, item in wanted) / len(self.batch["item"])
            self.events.add("hits", value=hits, recall=answer["recall"], today=self.today, version=answer["version"])

    def portraits(self) -> list[dict[str, Any]]:
        """Returns what some users clicked before, what they are shown, and what they clicked next."""
        found = []
        lengths = torch.diff(self.batch["history.offsets"], append=torch.tensor([len(self.batch["history"])]))
        for place in torch.nonzero(lengths >= 10).flatten().tolist()[:: max(1, len(lengths) // (2 * PORTRAITS))]:
            inputs = some(self.batch, place, place + 1)
            shown = ask(self.urls[0], [inputs], 10)["items"][0]
            clicked = int(self.batch["item"][place])
            found.append({"history": inputs["history"].tolist()[-10:], "shown": shown, "clicked": clicked})
        return found[:PORTRAITS]


def some(batch: Batch, begin: int, end: int) -> Batch:
    """Returns the users of these rows, as the user tower takes them."""
    offsets = batch["history.offsets"]
    stop = int(offsets[end]) if end < len(offsets) else len(batch["history"])
    found = {name: batch[name][begin:end] for name in ("user", "age")}
    found["history"] = batch["history"][int(offsets[begin]) : stop]
    found["history.offsets"] = offsets[begin:end] - offsets[begin]
    return found


def ask(url: str, batches: list[Batch], k: int, **options: Any) -> dict[str, Any]:
    """Returns a replica's answer for the users of a batch."""
    inputs = {name: batches[0][name].tolist() for name in DSSM.USER_INPUTS}
    body = json.dumps({"inputs": inputs, "k": k, **options}).encode()
    try:
        with urlopen(Request(url, body), timeout=60) as answer:
            found: dict[str, Any] = json.load(answer)
    except HTTPError as error:
        raise SystemExit(f"{url} answers {error.code}: {error.read().decode()}") from None
    return found


def main() -> None:
    """Runs the demonstration; returns when the last day is trained and the page is written."""
    args = read_arguments()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    began_s = time.monotonic()
    days = Days(open_data(args.data))
    events = Events(args.folder / "events.jsonl")
    logs = args.folder / "log"
    script = partial(processes.running, sys.executable)
    shared: tuple[str | Path, ...] = (args.folder, "--data", days.folder)
    job_line: list[str | Path] = ["-m", "fleet.launch", "--server_num=1", f"--worker_num={args.workers}"]
    job_line += ["--log_dir", logs, HERE / "train_days.py", *shared, "--guarded", "--bad-day", str(args.bad_day)]
    job_line += ["--batch-size", str(args.batch_size)]
    environment = {**os.environ, "FLEET_PS_FOLDER": str(args.folder / "journal")}
    with ExitStack() as stack:
        job = stack.enter_context(script(*job_line, env=environment, stdout=subprocess.DEVNULL))
        processes.wait_for(args.folder / "rows" / "versions" / "day-0" / "version.json", job, logs)
        # Training waits for the guard after each day, so the processes that begin here meet all days but the first.
        towers, rows = args.folder / "towers", args.folder / "rows"
        serve = (HERE / "retrieve.py", towers, rows, days.folder / "items.parquet", "--port=0", "--kind", args.kind)
        servers = [stack.enter_context(script(*serve, stdout=subprocess.PIPE)) for _ in REPLICAS]
        watch = (HERE / "watch.py", *shared, "--drop", str(args.drop))
        guard = stack.enter_context(script(*watch, stdout=subprocess.PIPE))
        visitors = Visitors([first_line(server) for server in servers], days, events, args.clicks)
        first_line(guard)
        while job.poll() is None:
            visitors.tick()
            time.sleep(TICK_S)
        if job.returncode:
            raise SystemExit(f"Training failed; its log is in {logs}.")
        portraits = visitors.portraits()
    story = Story(events.read(), time.monotonic() - began_s)
    write_page(args.folder / "index.html", story, days, portraits)
    for line in story.lines():
        print(line)
    print(f"the page: {args.folder / 'index.html'}")


def first_line(process: subprocess.Popen[str]) -> str:
    """Returns what a process prints when it is ready: a replica its address."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit(f"{process.args!r} ended before it was ready.")
    return line


def read_arguments() -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for everything that is written; what is there is replaced")
    parser.add_argument("--data", default=SHOP, help="the shop, as for train.py (default: %(default)s)")
    parser.add_argument("--workers", type=positive_int, default=1, help="of the job (default: %(default)s)")
    parser.add_argument("--batch-size", type=positive_int, default=128, help="of a worker (default: %(default)s)")
    parser.add_argument("--bad-day", type=int, default=3, help="from 0; -1 for none (default: %(default)s)")
    parser.add_argument("--drop", type=float, default=0.03, help="what recall may lose (default: %(default)s)")
    parser.add_argument("--clicks", type=positive_int, default=400, help="asked for at once (default: %(default)s)")
    parser.add_argument("--kind", choices=("exact", "ivf"), default="exact", help="of the index (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
