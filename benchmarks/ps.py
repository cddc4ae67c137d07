"""The parameter server as a training script meets it, beside plain torch on the same machine in the same run.

    python benchmarks/ps.py                  # about five minutes
    python benchmarks/ps.py --quick          # about one
    python benchmarks/ps.py --only large     # 50 million rows on one server: minutes, 24 GB, 10 GB of disk

Wide & deep, three layers of 400, 26 slots, rows of 10 (and 1 for the linear part), a vocabulary of a million ids, SGD:
one server and two workers, whose processes also train the same model in plain torch, each alone, in blocks between
those with the server. The share by processor time counts all processes of the job, the server too: that is the share
where these processes fill all processors, and other work on the machine does not change it.

``--only tables`` and ``--only wire`` run the scripts of the parts underneath.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from _table import markdown, ratios, spread  # noqa: E402

HERE = Path(__file__).parent
# Samples per second of both workers of Paddle 2.6.2 with one server and two workers, as recorded on another day on a
# machine of this kind (2 shared cores), on the 200 rows of the seed's sample.
PADDLE = {
    ("async", 10): (1577, 2144),
    ("async", 100): (15309, 17867),
    ("geo", 10): (4893, 4893),
    ("geo", 100): (26061, 26061),
}
# What is asked of the modes: a share of plain torch, and a multiple of Paddle. "merged" is async with longer queues.
SHARES = {("async", 10): 0.5, ("async", 100): 0.7, ("async", 1000): 0.8}
MULTIPLES = {("async", 10): 5.0, ("async", 100): 2.5, ("geo", 10): 3.0, ("geo", 100): 2.0}
Blocks = list[list[tuple[float, ...]]]
MODES = ("sync", "async", "merged", "geo")
HEADER = (
    "mode",
    "batch",
    "samples/s",
    "plain torch",
    "share of plain torch",
    "by processor time",
    "asked",
    "of Paddle 2.6.2",
    "asked",
)


def training_rows(mode: str, batches: list[int], blocks: int, seconds: float, vocabulary: int) -> list[list[str]]:
    """Returns a row per batch size."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"mode": mode, "batches": batches, "blocks": blocks, "seconds": seconds}
        settings |= {"folder": folder, "vocabulary": vocabulary}
        launcher = [sys.executable, "-m", "fleet.launch", "--server_num=1", "--worker_num=2", f"--log_dir={folder}/log"]
        command = [*launcher, str(HERE / "_ps_steps.py"), json.dumps(settings)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{mode}: the job ended with {done.returncode}\n{done.stdout[-4000:]}")
        workers = [json.loads(Path(folder, f"samples.{rank}.json").read_text()) for rank in (0, 1)]
    rows = []
    for size in batches:
        served, plain = (
            [
                list(zip(*both, strict=True))
                for both in zip(*(worker[str(size)][kind] for worker in workers), strict=True)
            ]
            for kind in ("served", "plain")
        )
        rows.append(row(mode, size, served, plain))
    return rows


def row(mode: str, size: int, served: Blocks, plain: Blocks) -> list[str]:
    """Returns the cells of one case; a block has the rates of both workers and the processor times of both."""
    rates = [[sum(rates) for rates, _ in blocks] for blocks in (served, plain)]
    # Worker 0's time holds the server's, which works for both: the time of the job per sample is that of the mean.
    times = [[job_us(*block) for block in blocks] for blocks in (served, plain)]
    case = ("async" if mode == "merged" else mode, size)
    multiple = "-"
    if case in PADDLE:
        low, high = sorted(median(rates[0]) / rate for rate in PADDLE[case])
        multiple = f"{low:.1f}" if low == high else f"{low:.1f} to {high:.1f}"
    asked = [f"{table[case]:g}" if case in table else "-" for table in (SHARES, MULTIPLES)]
    cells = [spread(values, 0) for values in rates]
    return [
        mode, str(size), *cells, spread(ratios(*rates), 2), spread(ratios(times[1], times[0]), 2), asked[0], multiple,
        asked[1],
    ]  # fmt: skip


def job_us(rates: tuple[float, ...], times: tuple[float, ...]) -> float:
    """Returns the processor time of all processes per sample of both workers."""
    return sum(rate * time for rate, time in zip(rates, times, strict=True)) / sum(rates)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks")
    parser.add_argument("--only", choices=("training", "large", "tables", "wire"), default="training")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--batches", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--vocabulary", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=50_000_000, help="rows of --only large (default: %(default)s)")
    args = parser.parse_args()
    if args.only == "large":
        subprocess.run([sys.executable, str(HERE / "_ps_large.py"), str(args.rows)], check=True)
        return
    if args.only != "training":
        subprocess.run([sys.executable, str(HERE / f"ps_{args.only}.py")], check=True)
        return
    blocks, seconds = (3, 1.0) if args.quick else (9, 2.0)
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; {blocks} blocks of {seconds:g} s of each kind")
    rows = [
        cells for mode in args.modes for cells in training_rows(mode, args.batches, blocks, seconds, args.vocabulary)
    ]
    print(markdown(HEADER, rows))


if __name__ == "__main__":
    main()
