"""The same job on one machine and on nodes apart, at 1 Gbit/s: what the network takes, and what the wire's forms give.

    python benchmarks/network.py                # six minutes; root, ip and tc (Debian: iproute2)
    python benchmarks/network.py --quick        # one mode and small tables: a minute
    python benchmarks/network.py --only scale   # more servers while the job runs

DeepFM with 26 tables (``fleet.SparseEmbeddings``), two servers and two workers: all on this machine; the servers on one
node and the workers on another; each on a node of its own. Nodes are network namespaces on a bridge, whose cables have
1 Gbit/s each way by ``tc``, and 0.2 ms from a node to the others by its netem. Where the kernel has no netem, each
message waits 0.2 ms in the process that sends it, one after the other, which costs a job at least as much.

All share the processors of this machine: that hides how many nodes have, and shows what the cables take from a job.
Each job trains in blocks, in turn with plain torch in its workers, so that other work on the machine does not count:
"of one machine" divides the shares of plain torch. Memory that processes share is switched off between nodes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from _network_job import DELAY_S, PORT, Layout, has_netem, job_on, run_inside, shaped, started  # noqa: E402
from _ps_tables import Case, Row, job_us, rows_of_job  # noqa: E402
from _recommender_kills import LAST, Step, finish, longest_pause, steps_of  # noqa: E402
from _table import markdown, ratios, spread  # noqa: E402

from tests.helpers.namespaces import Network, missing  # noqa: E402

TABLES, SHARDS, BATCH, WARM_STEPS = 26, 6, 100, 200
ALONE = Layout("one machine", (0, 0), (0, 0))
APART = (Layout("two nodes", (1, 1), (2, 2)), Layout("four nodes", (1, 2), (3, 4)))
WIRES = ("float32", "bfloat16", "int8")
HEADER = (
    "job", "processor time of a step, us", "samples/s", "of one machine: by processor time", "by samples",
    "kB a step and worker: to servers, from them", "busiest cable, Mbit/s",
)  # fmt: skip


def wire_rows(mode: str, args: argparse.Namespace, delayed: bool) -> list[list[str]]:
    """Returns the rows of a mode: this machine, then the nodes with each form of the wire."""
    case = Case(
        tables=TABLES, ids=args.ids // TABLES, batches=args.batches, blocks=args.blocks, seconds=args.seconds,
        servers=2, model="deepfm",
    )  # fmt: skip
    settings = case.settings(mode, "collection")
    alone = rows_of_job(case, f"{mode}, {ALONE.what}", job_on(ALONE, settings, None))
    cells = [cells_of(row, alone, ALONE) for row in alone]
    for layout in APART:
        with shaped(layout.nodes, delayed) as network:
            for wire in args.wires:
                waits = 0.0 if delayed else DELAY_S
                workers = job_on(layout, {**settings, "wire": wire, "delay_s": waits}, network)
                rows = rows_of_job(case, f"{mode}, {layout.what}, {wire}", workers)
                cells += [cells_of(row, alone, layout) for row in rows]
    return cells


def cells_of(row: Row, alone: list[Row], layout: Layout) -> list[str]:
    """Returns the cells of a job at a batch size."""
    here = next(one for one in alone if one.size == row.size)
    samples, processor = (median(ours) / median(theirs) for ours, theirs in zip(shares(row), shares(here), strict=True))
    sent, taken, busiest = traffic(row, layout)
    return [
        f"{row.what}, batch {row.size}",
        spread([job_us(both) for both in row.served], 0),
        spread([row.rate(both) for both in row.served], 0),
        f"{processor:.2f}",
        f"{samples:.2f}",
        f"{sent / 1e3:.0f}, {taken / 1e3:.0f}" if layout is not ALONE else "-",
        f"{busiest / 1e6:.0f}" if layout is not ALONE else "-",
    ]


def shares(row: Row) -> tuple[list[float], list[float]]:
    """Returns a job's shares of plain torch in turn: of its samples, and by processor time."""
    rates = [[row.rate(both) for both in blocks] for blocks in (row.served, row.plain)]
    times = [[job_us(both) for both in blocks] for blocks in (row.served, row.plain)]
    return ratios(*rates), ratios(times[1], times[0])


def traffic(row: Row, layout: Layout) -> tuple[float, float, float]:
    """Returns the bytes that a worker's step sends and takes, and the bits a second of its cable, the fuller way."""
    sharing = layout.workers.count(layout.workers[0])  # workers of a node count the same bytes
    sent, taken, busiest = [], [], []
    for both in row.served:
        for worker in both:
            steps = sum(one["steps"] for one in both) / 2 * sharing
            sent.append(worker["sent_bytes"] / steps)
            taken.append(worker["taken_bytes"] / steps)
            busiest.append(8 * max(worker["sent_bytes"], worker["taken_bytes"]) / worker["wall_s"])
    return median(sent), median(taken), median(busiest)


def print_scale(args: argparse.Namespace, delayed: bool) -> None:
    """Prints how fast a job trains on two servers, while shards move to a third, and on three."""
    layout = Layout("three nodes with servers, one with workers", (1, 2, 3), (4, 4))
    hosts = [Network.address(node) for node in layout.servers]
    shards = [[f"{host}:{PORT + shard}" for shard in range(SHARDS)] for host in hosts]
    settings = {"mode": "sync", "tables": TABLES, "ids": args.ids // TABLES}
    with (
        shaped(layout.nodes, delayed) as network,
        started("_recommender_kill_worker.py", settings, layout, network, shards) as (processes, folder),
    ):
        path = Path(folder)
        processes.wait_until(lambda: len(steps_of(path)) > WARM_STEPS)
        spans = [time.time()]
        time.sleep(args.scale_s)
        spans.append(time.time())
        said = run_inside(network, 4, ["-m", "fleet.ps", "scale", shards[0][0], "3"])
        spans.append(time.time())
        time.sleep(args.scale_s)
        spans.append(time.time())
        steps = steps_of(path)
        finish(path, max(step.number for step in steps) + LAST)
        processes.wait()
    rates = [rate(steps, since, until) for since, until in pairwise(spans)]
    pause = longest_pause([step.time for step in steps if step.rank == 0], spans[1])
    print(f"\nMore servers while a job runs: {layout.what}; sync, batch {BATCH}, {args.ids:,} ids, {SHARDS} shards\n")
    print(said.strip())
    print("samples/s: {:.0f} on two servers, {:.0f} while shards move, {:.0f} on three".format(*rates))
    print(f"longest time between two steps of worker 0 from the command on: {pause:.2f} s")


def rate(steps: list[Step], since: float, until: float) -> float:
    """Returns the samples per second of all workers in a span of time."""
    return BATCH * sum(since < step.time <= until for step in steps) / (until - since)


def arguments() -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sync, batch 100, 26,000 ids, one block of 0.5 s")
    parser.add_argument("--only", choices=("wire", "scale"))
    parser.add_argument("--modes", nargs="+", choices=("sync", "async"), help="default: both")
    parser.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES))
    parser.add_argument("--batches", type=int, nargs="+", help="default: 100 1000")
    parser.add_argument("--ids", type=int, help="of all tables (default: 1,000,000)")
    args = parser.parse_args()
    quick = {"modes": ["sync"], "batches": [100], "ids": 26_000}
    full = {"modes": ["sync", "async"], "batches": [100, 1000], "ids": 1_000_000}
    for name, value in (quick if args.quick else full).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.blocks, args.seconds, args.scale_s = (1, 0.5, 2.0) if args.quick else (3, 1.0, 10.0)
    return args


def main() -> None:
    """Prints the tables."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # nodes and processes go also then
    if why := missing():
        raise SystemExit(f"network.py: nodes cannot be namespaces here: {why}")
    delayed = has_netem()
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; cables of 1 Gbit/s; 0.2 ms ", end="")
    print("by netem" if delayed else "before each message, in its sender: this kernel has no netem")
    if args.only in (None, "wire"):
        cells = [row for mode in args.modes for row in wire_rows(mode, args, delayed)]
        print(markdown(HEADER, cells), flush=True)
    if args.only in (None, "scale"):
        print_scale(args, delayed)


if __name__ == "__main__":
    main()
