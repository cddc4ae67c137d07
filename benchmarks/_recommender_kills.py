"""What a kill -9 of a worker or of a server costs: the part ``kills`` of ``recommenders.py``.

A job of DeepFM trains (:mod:`_recommender_kill_worker`), one of its processes is killed, and its launcher starts that
again: fleet's the process, torchrun all workers. Reported are the longest pause between two steps of a worker from the
kill on, and the updates that are missing at the end. TorchRec has no launcher of its own: under torchrun it pays what
plain torch pays. Paddle's launcher starts nothing again where one has parameter servers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from _ps_job import HERE
from _table import markdown, spread

WORKERS, TABLES, LIMIT_S = 2, 26, 240.0
# Steps of each worker before the kill, and after everything runs again; and those that both do after the last one seen.
BEFORE, AFTER, LAST = 100, 100, 50
CASES = (("sync", "worker"), ("sync", "server"), ("async", "worker"), ("async", "server"), ("ddp", "worker"))
NAMES = {"sync": "fleet, sync", "async": "fleet, async", "ddp": "plain torch, DDP, under torchrun"}
# torchrun's default store hands old addresses to restarted workers; this opt-out lets it recover.
OPT_OUT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
HEADER = (
    "system", "killed", "pause of the killed worker, s", "pause of the other, s", "updates lost, of both workers",
)  # fmt: skip


class Step(NamedTuple):
    """A step of a worker, and when it was done."""

    rank: int
    number: int
    time: float
    pid: int


class Killed(NamedTuple):
    """The longest pauses of both workers after a kill, and the updates lost."""

    pauses: tuple[float, float]
    lost: int


def print_kills(args: argparse.Namespace) -> None:
    """Measures and prints the table."""
    num_ids, repeat = args.ids[0], 1 if args.quick else 3
    rows = []
    for mode, target in CASES:
        found = [killed_once(mode, target, num_ids // TABLES) for _ in range(repeat)]
        own, other = ([one.pauses[rank] for one in found] for rank in (1, 0))
        lost = f"{median(one.lost for one in found):.0f}"
        lost += ": all since the last checkpoint" if mode == "ddp" else ""
        what = "worker 1" if target == "worker" else "the server"
        rows.append([NAMES[mode], what, spread(own, 1), spread(other, 1), lost])
        print(f"{NAMES[mode]}, {target}: done, load {os.getloadavg()[0]:.1f}", flush=True)
    print(f"\nDeepFM, {num_ids:,} ids, batch 100; kill -9, {repeat} times each\n")
    print(markdown(HEADER, rows), flush=True)


def killed_once(mode: str, target: str, num_ids: int) -> Killed:
    """Runs a job, kills one of its processes, and returns what that cost."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = json.dumps({"mode": mode, "tables": TABLES, "ids": num_ids, "folder": name})
        command = [*launcher(mode, name), str(HERE / "_recommender_kill_worker.py"), settings]
        with (folder / "out").open("w") as out:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **OPT_OUT}
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            return kill_and_watch(process, folder, target)
        finally:
            finish(folder, 0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def launcher(mode: str, folder: str) -> list[str]:
    """Returns the words that start a job."""
    if mode == "ddp":
        words = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=3", f"--log-dir={folder}/log"]
        return [sys.executable, "-m", "torch.distributed.run", *words]
    words = ["--server_num=1", f"--worker_num={WORKERS}", "--max_restart=3", f"--log_dir={folder}/log"]
    return [sys.executable, "-m", "fleet.launch", *words]


def kill_and_watch(process: subprocess.Popen[Any], folder: Path, target: str) -> Killed:
    """Kills a process of the job, lets the job go on and end, and returns what that cost."""
    before = wait_for_steps(process, folder, 0.0, BEFORE)
    if target == "server":
        victim = int(next(folder.glob("server.*")).suffix[1:])
    else:
        victim = next(step.pid for step in reversed(before) if step.rank == 1)
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    if target == "server":
        wait_until(process, folder, lambda: len(list(folder.glob("server.*"))) > 1)
        after = wait_for_steps(process, folder, time.time(), AFTER)
    else:
        wait_until(process, folder, lambda: any(step.pid != victim for step in steps_of(folder) if step.rank == 1))
        after = wait_for_steps(process, folder, time.time(), AFTER)
    pauses = tuple(longest_pause([step.time for step in after if step.rank == rank], killed) for rank in (0, 1))
    finish(folder, max(step.number for step in steps_of(folder)) + LAST)
    process.wait(LIMIT_S)
    return Killed((pauses[0], pauses[1]), lost_updates(folder, killed))


def finish(folder: Path, step: int) -> None:
    """Lets the workers end before a step; the same one for both, so that each update of sync mode has two gradients."""
    part = folder / "finish.part"
    part.write_text(f"{step}")
    part.replace(folder / "finish")


def lost_updates(folder: Path, killed: float) -> int:
    """Returns how many steps of both workers are in no parameter at the end."""
    counted = sorted(folder.glob("counted.*.json"))
    if counted:
        found = [json.loads(path.read_text()) for path in counted]
        return round(sum(one["steps"] - one["updates"] for one in found))
    steps = steps_of(folder)
    last = {rank: max(step.number for step in steps if step.rank == rank and step.time < killed) for rank in (0, 1)}
    first = {
        rank: min(step.number for step in steps if step.rank == rank and step.time > killed + 1) for rank in (0, 1)
    }
    return sum(last[rank] + 1 - first[rank] for rank in (0, 1))


def longest_pause(times: list[float], since: float) -> float:
    """Returns the longest time between two steps, of those from the last one before ``since`` on."""
    begin = max(time for time in times if time <= since)
    kept = sorted(time for time in times if time >= begin)
    return max(later - earlier for earlier, later in zip(kept, kept[1:], strict=False))


def steps_of(folder: Path) -> list[Step]:
    """Returns the steps so far, in order."""
    if not (folder / "steps").exists():
        return []
    lines = (line.split() for line in (folder / "steps").read_text().splitlines())
    return [Step(int(rank), int(number), float(when), int(pid)) for rank, number, when, pid in lines]


def wait_for_steps(process: subprocess.Popen[Any], folder: Path, since: float, count: int) -> list[Step]:
    """Returns all steps once each worker has done ``count`` of them after ``since``."""

    def done() -> bool:
        new = [step.rank for step in steps_of(folder) if step.time > since]
        return all(new.count(rank) >= count for rank in range(WORKERS))

    wait_until(process, folder, done)
    return steps_of(folder)


def wait_until(process: subprocess.Popen[Any], folder: Path, done: Any) -> None:
    """Returns when ``done()``; ends the benchmark when the job has ended or takes too long."""
    deadline = time.monotonic() + LIMIT_S
    while not done():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the job ended or hangs\n{(folder / 'out').read_text()[-4000:]}")
        time.sleep(0.05)
