"""DeepFM and two towers with a table for each of 26 fields, beside what a recommender would be trained with otherwise.

    python benchmarks/recommenders.py --torchrec PYTHON --paddle PYTHON   # everything: about forty minutes
    python benchmarks/recommenders.py --models deepfm --ids 1000000       # one model, one size
    python benchmarks/recommenders.py --quick --only kills                # what a kill -9 costs

One machine, one run: a server and two workers of fleet in sync and async mode; plain torch in two processes under DDP,
with a dense table for each field; TorchRec on two processes; a server and two workers of Paddle 2.6.2. All train once
on the same samples by the same rule (Adagrad), then score the same others. The clicks are drawn by probabilities that
are known, so the best AUC stands beside those reached. ``--ids`` counts the ids of all 26 tables; every id has a row
from the start, so that tables have their full size.

After that the peers made with torch train in blocks, in turn with plain torch that exchanges nothing, in the same
processes: ratios to it stand other work on the machine. Processor time is that of all processes, servers too, for a
sample. Memory is resident, of workers and servers, before plain torch makes its tables; a shared page counts once.
``_ps_tables.py`` says how to make TorchRec's environment. Paddle's, on Python 3.10:

    python3.10 -m venv paddle
    paddle/bin/pip install paddlepaddle==2.6.2 'numpy<2' protobuf==3.20.2 setuptools
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _ps_job import job  # noqa: E402
from _ps_tables import NUM_WORKERS, TORCHREC, VARIANTS, Case, Row, Worker, gloo_job, job_us, rows_of_job  # noqa: E402
from _recommender_kills import print_kills  # noqa: E402
from _recommender_paddle_job import PADDLE, paddle_job  # noqa: E402
from _table import markdown, ratios, spread  # noqa: E402

NUM_TABLES = 26
DDP = "plain torch, DDP"
MODES, OURS = ("sync", "async"), ("prefetch", "collection")
HEADER = (
    "system", "processor time of a sample, us", "samples/s", "of plain torch alone: by processor time", "by samples",
    "of DDP", "of TorchRec", "of Paddle", "AUC", "memory, GB",
)  # fmt: skip


@dataclass
class System:
    """What one system did on one model of one size.

    Args:
        what: its name.
        workers: what its workers wrote.
        rows: its blocks in turn with plain torch, one row for each batch size; none for Paddle.
    """

    what: str
    workers: list[Worker]
    rows: list[Row] = field(default_factory=list)

    @property
    def learned(self) -> list[dict[str, Any]]:
        """What the workers measured while they trained on the samples of the AUC."""
        return [worker["learn"] for worker in self.workers]  # type: ignore[misc]

    def rate(self, size: int) -> float:
        """Returns the samples per second of both workers in the pass over the samples."""
        return sum(size * one["steps"] / one["wall_s"] for one in self.learned)

    def sample_us(self, size: int) -> float:
        """Returns the processor time of all processes for a sample of that pass."""
        used = sum(one["own_s"] + one.get("servers_s", 0.0) for one in self.learned)
        return 1e6 * used / sum(size * one["steps"] for one in self.learned)

    def step_us(self, size: int) -> float:
        """Returns the processor time of all processes for a step of a worker, in the blocks."""
        return median(job_us(both) for row in self.rows if row.size == size for both in row.served)

    def share(self, size: int) -> tuple[list[float], list[float]]:
        """Returns the shares of plain torch's samples and, by processor time, of its work; a pair of blocks each."""
        row = next(row for row in self.rows if row.size == size)
        rates = [[row.rate(both) for both in blocks] for blocks in (row.served, row.plain)]
        times = [[job_us(both) for both in blocks] for blocks in (row.served, row.plain)]
        return ratios(*rates), ratios(times[1], times[0])


def measured(case: Case, torchrec: str | None, paddle: str | None) -> Iterator[System]:
    """Yields the systems, the peers first."""
    peers = [(DDP, "_tables_ddp.py", sys.executable), (TORCHREC, "_tables_torchrec.py", torchrec)]
    for what, script, python in peers:
        if python:
            try:
                yield system(case, what, gloo_job(case, what, script, python))
            except SystemExit as error:  # a peer that crashes ends no one else's run
                print(f"{error}\n{what}: left out")
    if paddle and (workers := paddle_job(case, paddle)):
        yield System(PADDLE, workers)
    for mode in MODES:
        for variant in OURS:
            workers = job("_tables_fleet.py", case.settings(mode, variant), case.servers)
            yield system(case, f"{mode}, {VARIANTS[variant]}", workers)


def system(case: Case, what: str, workers: list[Worker]) -> System:
    """Returns a system with its blocks."""
    return System(what, workers, rows_of_job(case, what, workers) if case.blocks else [])


def cells(one: System, all_of_them: Sequence[System], size: int, first: bool) -> list[str]:
    """Returns the cells of a system at a batch size; those of the pass over the samples at the first size."""
    learned, auc = one.learned, f"{one.learned[0]['auc']:.4f} of {one.learned[0]['best_auc']:.4f}"
    own = [f"{one.sample_us(size):.0f}", f"{one.rate(size):.0f}"] if first else ["-", "-"]
    shares = [spread(share, 2) for share in reversed(one.share(size))] if one.rows else ["-", "-"]
    memory = sum(worker["resident"] for worker in learned) / 1e9
    others = [beside(one, all_of_them, size, name, first) for name in (DDP, TORCHREC, PADDLE)]
    return [one.what, *own, *shares, *others, *([auc, f"{memory:.2f}"] if first else ["-", "-"])]


def beside(one: System, others: Sequence[System], size: int, name: str, first: bool) -> str:
    """Returns by processor time and by samples how often ``one`` does what the named system does.

    Where both have blocks in turn with plain torch, samples are the ratio of their shares of it, which other work on
    the machine does not change; otherwise both are those of the passes over the samples.
    """
    found = [other for other in others if other.what.startswith(name) and other is not one]
    if not found:
        return "-"
    other = found[0]
    if one.rows and other.rows:
        samples = median(one.share(size)[0]) / median(other.share(size)[0])
        processor = other.step_us(size) / one.step_us(size)
    elif first and other.rate(size):
        samples, processor = one.rate(size) / other.rate(size), other.sample_us(size) / one.sample_us(size)
    else:
        return "-"
    return f"{processor:.2f}; {samples:.2f}"


def print_training(args: argparse.Namespace) -> None:
    """Measures and prints a table for each model and number of ids."""
    for model in args.models:
        for num_ids in args.ids:
            case = Case(
                tables=NUM_TABLES, ids=num_ids // NUM_TABLES, batches=args.batches, servers=1, model=model,
                blocks=args.blocks, seconds=args.seconds, samples=args.samples,
            )  # fmt: skip
            load = os.getloadavg()[0]
            systems = list(measured(case, args.torchrec, args.paddle))
            for i, size in enumerate(args.batches):
                rows = [cells(one, systems, size, not i) for one in systems if one.rows or not i]
                print(f"\n{model}, {num_ids:,} ids, batch {size}, {args.samples:,} samples; ", end="")
                print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after\n")
                print(markdown(HEADER, rows), flush=True)
    print("\nRatios to DDP, TorchRec and Paddle: by processor time; by samples.")
    for flag, what in (("--torchrec", TORCHREC), ("--paddle", PADDLE)):
        if not getattr(args, flag[2:]):
            print(f"{what}: not measured, needs {flag} PYTHON; the top of this file says how to make its environment.")


def arguments() -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 samples, one block of 0.5 s, 26,000 ids")
    parser.add_argument("--only", choices=("training", "kills"))
    parser.add_argument("--models", nargs="+", choices=("deepfm", "towers"), default=["deepfm", "towers"])
    parser.add_argument("--ids", type=int, nargs="+", help="of all tables (default: 1,000,000 and 20,000,000)")
    parser.add_argument("--batches", type=int, nargs="+", help="sizes; the AUC is of the first (default: 100 1000)")
    parser.add_argument("--samples", type=int, help="of both workers, for the AUC (default: 200,000)")
    parser.add_argument("--blocks", type=int, help="pairs of blocks (default: 5)")
    parser.add_argument("--torchrec", metavar="PYTHON", help="interpreter of an environment with torchrec 1.4.0")
    parser.add_argument("--paddle", metavar="PYTHON", help="interpreter of an environment with paddlepaddle 2.6.2")
    args = parser.parse_args()
    quick = {"ids": [26_000], "batches": [100], "samples": 20_000, "blocks": 1}
    full = {"ids": [1_000_000, 20_000_000], "batches": [100, 1000], "samples": 200_000, "blocks": 5}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.seconds = 0.5 if args.quick else 1.0
    return args


def main() -> None:
    """Prints the tables."""
    args = arguments()
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; {NUM_WORKERS} workers, 1 server")
    if args.only in (None, "training"):
        print_training(args)
    if args.only in (None, "kills"):
        print_kills(args)


if __name__ == "__main__":
    main()
