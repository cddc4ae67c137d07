"""The parameter server in one table: kernels, wire, memory, and training as a script meets it.

    python benchmarks/ps.py                  # all parts, one table: about fifteen minutes
    python benchmarks/ps.py --quick          # fewer and shorter repeats, a tenth of the rows: about three
    python benchmarks/ps.py --only training  # or: kernels, wire, script, publish, serving
    python benchmarks/ps.py --only tables    # models with one table a feature: five minutes, or two
    python benchmarks/ps.py --only script --data PATH  # the untuned script, on files in Criteo's format
    python benchmarks/ps.py --only large     # 50 million rows on one server: minutes, 24 GB, 10 GB of disk
    python benchmarks/ps.py --only standby   # what a standby costs its server: a minute or two
    python benchmarks/ps.py --only scale     # what shards that can move cost, and steps while they do: a minute

Kernels: pull and push of dim 16 with Adagrad in one thread, in turn with a bare gather, and the memory of a row. Wire:
one client and one server process over loopback, in turn with the same bytes without a server and the same table calls
without a wire; and the same with the seals of its messages and without.

Publishing: two jobs in turn, one sends its changed rows to a redis-server; and how long a pushed row takes to be there.

Training: wide & deep, three layers of 400, 26 slots, rows of 10 (and 1 for the linear part), a vocabulary of a million
ids, SGD: one server and two workers, whose processes also train the same model in plain torch, each alone, in blocks
between those with the server. The share by processor time counts all processes of the job, the server too: that is the
share where these processes fill all processors, and other work on the machine does not change it.

Script: the same model as FleetX's users write it, ``nn.Embedding(1000001, 10, sparse=True)`` in a plain loop, two jobs
one after the other in each mode. Samples per second and processor time per step are those of one worker, the mean of
both, and plain torch is one process alone. Beside sync: two processes that exchange the dense gradients of each step
through one memory and do nothing else, which says what the machine allows at that moment.

Tables: 26 tables of 40,000 ids by Zipf's law, rows of 12, two layers of 400, Adagrad, batch 100: two workers beside two
processes of plain torch in turn, and TorchRec on the same with ``--torchrec PYTHON`` (``_ps_tables.py`` says how to
install it). ``--tables`` takes other numbers of tables, also several; ``--vocabulary`` counts the ids of all tables.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _ps_job import HERE, job  # noqa: E402
from _ps_tables import add_arguments, print_tables  # noqa: E402
from _table import markdown, ratios, spread  # noqa: E402

PARTS = ("training", "script", "large", "standby", "scale", "tables", "kernels", "wire", "publish", "serving")
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
# The study's kernels beside its gather at 10 million rows, and the memory of its rows.
STUDY = {"pull": 12.5 / 33.7, "push": 10.4 / 33.7}
ROW_BYTES = 128 + 27
# What is asked of the script, as a share of plain torch.
SCRIPT_SHARES = {
    ("async", 10): 0.8, ("async", 100): 0.9, ("geo", 10): 0.95, ("geo", 100): 0.97,
    ("sync", 10): 0.4, ("sync", 100): 0.45,
}  # fmt: skip
Blocks = list[list[tuple[float, ...]]]
MODES = ("sync", "async", "merged", "geo")
HEADER = ("what", "measured", "beside it", "ratio", "by processor time", "asked")


def part_json(script: str, *arguments: str) -> list[dict[str, Any]]:
    """Runs a script of this folder and returns what its last line says; the others are shown."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=True
    )
    *lines, last = done.stdout.splitlines()
    print("\n".join(lines), flush=True)
    found: list[dict[str, Any]] = json.loads(last)
    return found


def kernel_rows(rows: int, rounds: int) -> list[list[str]]:
    """Returns the rows on tables without a wire."""
    cells = []
    found = part_json("_ps_kernels.py", "--rows", str(rows), "--rounds", str(rounds))
    for case in found:
        for name, of_study in STUDY.items():
            share = case[name] / case["gather"]
            cells.append(
                [
                    f"{name}, {rows:,} rows, {case['ids']} ids",
                    f"{case[name]:.1f} M rows/s",
                    f"gather {case['gather']:.1f} M rows/s",
                    f"{share:.2f} = {share / of_study:.2f} of the study's {of_study:.2f}",
                    "all is",
                    "0.9 of the study's",
                ]
            )
    case = found[0]
    memory = f"{case['row_bytes']:.0f} B counted, {case['resident_bytes']:.0f} B resident"
    ratio = f"{case['row_bytes'] / ROW_BYTES:.2f}"
    cells.append([f"memory of a row, {rows:,} rows", memory, f"{ROW_BYTES} B", ratio, "-", "at most 1.10"])
    return cells


def wire_rows(rows: int, repeats: int) -> list[list[str]]:
    """Returns the rows on pull and push over loopback."""
    cells = []
    for case in part_json(
        "_ps_wire.py", "--rows", str(rows), "--repeats", str(repeats), "--cases", "plain", "prefetch"
    ):
        what = f"pull and push, {case['rows']:,.0f} ids" + (", prefetched" if case["case"] == "prefetch" else "")
        full = case["ids"] == "full"
        series = f"bytes {case['bytes_ms']:.3f} + tables {case['tables_ms']:.3f} ms"
        taken = f"{case['wall_ms']:.3f} ms, {case['rows_per_s'] / 1e6:.1f} M rows/s"
        cells.append([what, taken, series, f"{case['share']:.2f}", "-", "0.6" if full else "-"])
        rate = case["rows_per_server_s"] / 1e6
        server = f"{rate:.1f} M rows per server second"
        cells.append([what, server, "8 M", "-", f"{rate / 8:.2f}", "1" if full else "-"])
    for case in part_json("_ps_seals.py", "--rows", str(rows), "--blocks", str(3 * repeats)):
        what, share = f"seals on the wire, {case['rows']:,.0f} ids", f"{case['share']:.2f}"
        without, processor = f"{case['plain_ms']:.3f} ms without", f"{case['processor_share']:.2f}"
        cells.append([what, f"{case['sealed_ms']:.3f} ms", without, share, processor, "0.9"])
    return cells


def serving_rows(rows: int, rounds: int) -> list[list[str]]:
    """Returns the rows on lookups of published rows."""
    cells = []
    for case in part_json("_ps_serving.py", "--rows", str(rows), "--rounds", str(rounds)):
        rate = f"{case['ms']:.3f} ms, {case['ids'] / case['ms'] / 1e3:.2f} M ids/s"
        beside = f"{'numpy gather' if case['source'] == 'folder' else 'MGET'} {case['beside_ms']:.3f} ms"
        what = f"Reader, {case['source']}, {case['ids']:,} ids"
        cells.append([what, rate, beside, f"{case['ratio']:.2f}", "-", "-"])
        if case["served_ms"] is not None:
            cells.append(
                [f"{what}: delta of 1,000 rows served", f"{case['served_ms']:.1f} ms", "-", "-", "-", "2000 ms"]
            )
    return cells


def publish_rows(blocks: int, seconds: float, vocabulary: int) -> list[list[str]]:
    """Returns the rows on publishing to Redis, without any where redis-server is missing."""
    if shutil.which("redis-server") is None:
        print("publish: left out, needs redis-server on PATH", flush=True)
        return []
    sizes = ["--blocks", str(blocks), "--seconds", str(2 * seconds), "--vocabulary", str(vocabulary)]
    cells = []
    for mode in ("sync", "async"):
        case = part_json("_ps_publish.py", "--mode", mode, *sizes)[0]
        what = f"publishing to Redis, {mode}, batch {case['batch']}"
        taken, beside = f"{case['with']:.0f} samples/s", f"{case['without']:.0f} without"
        cells.append([what, taken, beside, f"{case['share']:.2f}", "-", "0.9"])
        served = f"{case['p50_s']:.2f} s median, {case['p99_s']:.2f} s for 99 of 100 steps"
        cells.append([f"{what}: from push to served row", served, "-", "-", "-", "at most 2 s"])
    return cells


def training_rows(mode: str, batches: list[int], blocks: int, seconds: float, vocabulary: int) -> list[list[str]]:
    """Returns the rows of a mode."""
    settings = {"mode": mode, "batches": batches, "blocks": blocks, "seconds": seconds, "vocabulary": vocabulary}
    workers = job("_ps_steps.py", settings)
    rows = []
    for size in batches:
        served, plain = (
            [
                list(zip(*both, strict=True))
                for both in zip(*(worker[str(size)][kind] for worker in workers), strict=True)
            ]
            for kind in ("served", "plain")
        )
        rows.extend(training_cells(mode, size, served, plain))
    return rows


def script_rows(mode: str, batches: list[int], rounds: int, seconds: float, data: str | None) -> list[list[str]]:
    """Returns the rows of the untuned script in a mode: two blocks, each a job of its own."""
    found: dict[int, list[list[tuple[tuple[float, ...], ...]]]] = {size: [[], []] for size in batches}
    for _ in range(2):
        workers = job(
            "_ps_script.py", {"mode": mode, "batches": batches, "blocks": rounds, "seconds": seconds, "data": data}
        )
        for size in batches:
            for kind, kept in zip(("served", "local"), found[size], strict=True):
                kept += zip(*(worker[str(size)][kind] for worker in workers), strict=True)
    cells = []
    for size, (served, local) in found.items():
        rates = [[sum(worker[0] for worker in both) / 2 for both in blocks] for blocks in (served, local)]
        times = [[sum(worker[1] for worker in both) / 2 for both in blocks] for blocks in (served, local)]
        # Worker 0 took the server's time per step of its own, in which the server worked for both.
        server = [both[0][2] * both[0][0] / (both[0][0] + both[1][0]) for both in served]
        whole = [own + its for own, its in zip(times[0], server, strict=True)]
        used = (
            f"worker {median(times[0]):.0f} + server {median(server):.0f} us a step; plain torch {median(times[1]):.0f}"
        )
        cells.append(
            [
                f"script, {mode}, batch {size}: {used}",
                spread(rates[0], 0) + " samples/s",
                f"plain torch {spread(rates[1], 0)}",
                spread(ratios(*rates), 2),
                spread(ratios(times[1], whole), 2),
                f"{SCRIPT_SHARES[mode, size]:g}" if (mode, size) in SCRIPT_SHARES else "-",
            ]
        )
    return cells


def bare_rows(batches: list[int], rounds: int) -> list[list[str]]:
    """Returns the rows of an exchange of the script's dense gradients and nothing else."""
    cells = []
    for found in part_json("_ps_bare.py", *map(str, batches), str(3 * rounds)):
        share = spread(ratios(found["bare"], found["plain"]), 2)
        cells.append(
            [
                f"bare exchange of dense gradients, batch {found['size']}",
                spread(found["bare"], 0) + " samples/s",
                f"plain torch {spread(found['plain'], 0)}",
                share,
                "-",
                "-",
            ]
        )
    return cells


def training_cells(mode: str, size: int, served: Blocks, plain: Blocks) -> list[list[str]]:
    """Returns the rows of one case; a block has the rates of both workers and the processor times of both."""
    rates = [[sum(rates) for rates, _ in blocks] for blocks in (served, plain)]
    # Worker 0's time holds the server's, which works for both: the time of the job per sample is that of the mean.
    times = [[job_us(*block) for block in blocks] for blocks in (served, plain)]
    case = ("async" if mode == "merged" else mode, size)
    what, taken = f"{mode}, batch {size}", spread(rates[0], 0) + " samples/s"
    shares = [spread(ratios(*rates), 2), spread(ratios(times[1], times[0]), 2)]
    cells = [
        [what, taken, f"plain torch {spread(rates[1], 0)}", *shares, f"{SHARES[case]:g}" if case in SHARES else "-"]
    ]
    if case in PADDLE:
        low, high = PADDLE[case]
        multiples = sorted({f"{median(rates[0]) / rate:.2f}" for rate in (low, high)}, key=float)
        paddle = f"Paddle 2.6.2 {low}" if low == high else f"Paddle 2.6.2 {low} to {high}"
        cells.append([what, taken, paddle, " to ".join(multiples), "-", f"{MULTIPLES[case]:g}"])
    return cells


def job_us(rates: tuple[float, ...], times: tuple[float, ...]) -> float:
    """Returns the processor time of all processes per sample of both workers."""
    return sum(rate * time for rate, time in zip(rates, times, strict=True)) / sum(rates)


def arguments() -> argparse.Namespace:
    """Returns the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter blocks, smaller tables")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--modes", nargs="+", choices=(*MODES, "hybrid"), help="hybrid: --only tables")
    parser.add_argument("--batches", type=int, nargs="+", help="batch sizes (default: 10 100 1000; tables: 100)")
    parser.add_argument(
        "--data", help="files in Criteo's format for the script (default: rows of that shape are drawn)"
    )
    parser.add_argument("--vocabulary", type=int, help="ids in all (default: 1,000,000; tables: 40,000 a table)")
    parser.add_argument("--rows", type=int, default=50_000_000, help="rows of --only large (default: %(default)s)")
    add_arguments(parser)
    args = parser.parse_args()
    wrong = {"merged"} if args.only == "tables" else {"hybrid"}
    if wrong & set(args.modes or ()):
        parser.error(f"--modes {' '.join(wrong)}: --only {args.only} has no such row")
    return args


def main() -> None:
    """Prints the table."""
    args = arguments()
    if args.only == "tables":
        print_tables(args)
        return
    if args.only in ("large", "standby", "scale"):  # print themselves
        own = [str(args.rows)] if args.only == "large" else ["--pushes", "500"] if args.quick else []
        subprocess.run([sys.executable, str(HERE / f"_ps_{args.only}.py"), *own], check=True)
        return
    modes, batches, vocabulary = args.modes or MODES, args.batches or [10, 100, 1000], args.vocabulary or 1_000_000
    blocks, seconds = (3, 1.0) if args.quick else (9, 2.0)
    cells: list[list[str]] = []
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; {blocks} blocks of {seconds:g} s of each kind")
    if args.only in (None, "kernels"):
        cells += kernel_rows(*((1_000_000, 3) if args.quick else (10_000_000, 5)))
    if args.only in (None, "wire"):
        cells += wire_rows(*((100_000, 3) if args.quick else (1_000_000, 7)))
    if args.only in (None, "publish"):
        cells += publish_rows(blocks, seconds, vocabulary)
    if args.only in (None, "serving"):
        cells += serving_rows(*((200_000, 20) if args.quick else (1_000_000, 50)))
    for mode in modes if args.only in (None, "training") else ():
        cells += training_rows(mode, batches, blocks, seconds, vocabulary)
        print(f"{mode}: done, load {os.getloadavg()[0]:.1f}", flush=True)
    for mode in modes if args.only in (None, "script") else ():
        sizes = [size for size in batches if size < 1000]
        if mode == "sync":
            cells += bare_rows(sizes, blocks)
        if mode != "merged":  # is no setting that the script has
            cells += script_rows(mode, sizes, blocks, seconds, args.data)
    print(markdown(HEADER, cells))


if __name__ == "__main__":
    main()
