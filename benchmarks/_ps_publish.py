"""What publishing to Redis costs a job, and how long a pushed row takes to be served: a part of ``ps.py``.

    python benchmarks/_ps_publish.py --mode async --batch 100 --blocks 7 --seconds 4

Two jobs of one server and two workers train the wide & deep model of ``ps.py``, one with ``publish``, the other
without; both keep a journal of level 1. Blocks of training alternate between them, so what another process takes from
the machine is taken from both alike. The rate counts both workers.

A step counts as served when the position in Redis names it: then every row that it pushed is there. The time runs from
the moment at which ``optimizer.step()`` of the slower worker returns, which in async mode is before the push is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
KINDS = ("without", "with")


def train(settings: dict[str, Any]) -> None:
    """Is a worker or the server of one of the jobs."""
    import torch
    from _ps_steps import DIM, NUM_DENSE, SLOTS, batches_of, draw, fill
    from model import WideDeep

    from fleet import fleet

    torch.set_num_threads(1)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = settings["mode"] != "sync"
    if settings["kind"] == "with":
        strategy.a_sync_configs = {"publish": settings["redis"], "publish_values": settings["values"]}
    fleet.init(strategy=strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    torch.manual_seed(0)
    served = WideDeep(fleet.SparseEmbedding, SLOTS, NUM_DENSE, DIM)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(served.parameters(), 1e-4), strategy)
    model = fleet.distributed_model(served)
    fleet.init_worker()
    fill(model, optimizer, settings["vocabulary"])
    batches = batches_of(draw(settings["vocabulary"], 1 + fleet.worker_index()), settings["batch"])
    fleet.barrier_worker()
    found = train_in_turn(settings, model, optimizer, batches)
    name = f"{settings['kind']}.{fleet.worker_index()}.json"
    Path(settings["folder"], name).write_text(json.dumps(found))
    fleet.stop_worker()


def train_in_turn(settings: dict[str, Any], model: Any, optimizer: Any, batches: Any) -> dict[str, Any]:
    """Trains in every second block; returns samples per second of each, and when each step was done."""
    from torch.nn.functional import binary_cross_entropy_with_logits

    from fleet import fleet

    folder, place = Path(settings["folder"]), KINDS.index(settings["kind"])
    rates: list[float] = []
    times: list[tuple[int, float]] = []
    client = fleet.session.server_job.trainer.connection.client
    warm = 0
    for number in range(settings["blocks"] + 1):
        wait_for(folder / f"turn.{2 * number + place}")
        fleet.barrier_worker()
        begun, done = time.perf_counter(), 0
        while time.perf_counter() - begun < settings["seconds"]:
            ids, dense, labels = next(batches)
            binary_cross_entropy_with_logits(model(ids, dense), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append((client.step, time.time()))
            done += len(labels)
        warm = warm or client.step
        rates.append(done / (time.perf_counter() - begun))
        fleet.barrier_worker()
        if fleet.is_first_worker():
            (folder / f"turn.{2 * number + place + 1}").touch()
    return {"rates": rates[1:], "times": times, "warm": warm}  # the first block warms up


def wait_for(path: Path) -> None:
    """Waits for the other job."""
    while not path.exists():
        time.sleep(0.005)


class Positions(threading.Thread):
    """Notes when Redis has which step."""

    def __init__(self, port: int, job: str) -> None:
        super().__init__(daemon=True)
        self._port, self._job = port, job
        self.seen: list[tuple[float, int]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        """Asks every few milliseconds."""
        import redis

        with redis.Redis(port=self._port) as client:
            while not self.ended.wait(0.005):
                state = client.hget(f"fleet:{self._job}:position", "0")
                step = json.loads(state)["step"] if state else 0
                if not self.seen or self.seen[-1][1] != step:
                    self.seen.append((time.time(), step))


def latencies(workers: list[dict[str, Any]], seen: list[tuple[float, int]]) -> list[float]:
    """Returns for each step that both workers took, how long after the later of them Redis had it.

    Not of the first block, in which the whole table of a new job is published.
    """
    found, at = [], 0
    first, second = (dict(worker["times"]) for worker in workers)
    warm = max(worker["warm"] for worker in workers)
    for step in sorted(step for step in first.keys() & second.keys() if step > warm):
        pushed = max(first[step], second[step])
        while at < len(seen) and seen[at][1] < step:
            at += 1
        if at == len(seen):
            break
        found.append(seen[at][0] - pushed)
    return found


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs both jobs beside one Redis and returns what they found."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        command = ["redis-server", "--port", f"{port}", "--dir", folder, "--appendonly", "yes", "--save", ""]
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        positions = Positions(port, "bench-with")
        try:
            time.sleep(1.0)
            positions.start()
            run_jobs({**settings, "folder": folder, "redis": f"redis://127.0.0.1:{port}/0"})
        finally:
            positions.ended.set()
            positions.join()
            redis.kill()
            redis.wait()
        workers = {
            kind: [json.loads(Path(folder, f"{kind}.{rank}.json").read_text()) for rank in (0, 1)] for kind in KINDS
        }
    rates = {
        kind: [sum(both) for both in zip(*(worker["rates"] for worker in found), strict=True)]
        for kind, found in workers.items()
    }
    waits = sorted(latencies(workers["with"], positions.seen))
    return {
        "with": median(rates["with"]),
        "without": median(rates["without"]),
        "share": median(a / b for a, b in zip(rates["with"], rates["without"], strict=True)),
        "p50_s": waits[len(waits) // 2],
        "p99_s": waits[len(waits) * 99 // 100],
        "steps": len(waits),
    }


def run_jobs(settings: dict[str, Any]) -> None:
    """Runs both jobs to their end."""
    folder = settings["folder"]
    jobs = []
    try:
        for kind in KINDS:
            launcher = [sys.executable, "-m", "fleet.launch", "--server_num=1", "--worker_num=2"]
            launcher += [f"--log_dir={folder}/log-{kind}", str(Path(__file__))]
            variables = {"PADDLE_JOB_ID": f"bench-{kind}", "FLEET_PS_FOLDER": f"{folder}/state-{kind}"}
            jobs.append(
                subprocess.Popen(
                    [*launcher, "--train", json.dumps({**settings, "kind": kind})],
                    env={**os.environ, **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        Path(folder, "turn.0").touch()
        for kind, job in zip(KINDS, jobs, strict=True):
            said = job.communicate(timeout=540)[0]
            if job.returncode:
                raise SystemExit(f"{kind} publishing: the job ended with {job.returncode}\n{said[-4000:]}")
    finally:
        for job in jobs:
            job.terminate()


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("async", "sync"), default="async")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--vocabulary", type=int, default=1_000_000)
    parser.add_argument("--values", choices=("float32", "bfloat16", "int8"), default="float32")
    parser.add_argument("--json", action="store_true", help="the last line is the result as JSON")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(json.loads(args.train))
        return
    if shutil.which("redis-server") is None:
        raise SystemExit("needs redis-server on PATH (Debian: apt-get install redis-server)")
    found = measure(
        {name: getattr(args, name) for name in ("mode", "batch", "blocks", "seconds", "vocabulary", "values")}
    )
    print(
        f"{args.mode}, batch {args.batch}, {args.values}: {found['with']:.0f} samples/s with publishing, "
        f"{found['without']:.0f} without, share {found['share']:.2f}; served after {found['p50_s']:.2f} s (median), "
        f"{found['p99_s']:.2f} s (99 of 100 of {found['steps']} steps)"
    )
    if args.json:
        print(json.dumps([{**found, "mode": args.mode, "batch": args.batch}]))


if __name__ == "__main__":
    main()
