"""Models with one table a feature: the part ``tables`` of ``ps.py``, beside plain torch and TorchRec.

Every row is a job of its own: two workers, whose processes train the same model (:mod:`_tables_model`) in plain torch
as well, each alone and with an optimizer that knows only its own gradients, in blocks in turn with those of the job.
TorchRec needs an environment of its own, whose Python ``--torchrec`` names:

    python3 -m venv torchrec
    torchrec/bin/pip install torch==2.9.1 torchmetrics==1.0.3 tensordict pyre-extensions iopath tqdm numpy
    torchrec/bin/pip install --no-deps torchrec==1.4.0
    torchrec/bin/pip install --no-deps fbgemm-gpu-cpu==1.4.0

TorchRec asks for fbgemm-gpu, which comes with a newer torch and cannot be beside fbgemm-gpu-cpu: both write the same
folder. Hence ``--no-deps``; where fbgemm-gpu is installed, remove it and install fbgemm-gpu-cpu afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _ps_job import HERE, job, written
from _table import markdown, ratios, spread

from fleet import fleet

NUM_WORKERS = 2
MODES = ("async", "sync")  # measured by default; hybrid and geo on request
TORCHREC = "TorchRec 1.4.0, sync"
VARIANTS = {
    "embedding": "nn.Embedding(sparse=True)",
    "sparse": "fleet.SparseEmbedding",
    "prefetch": "fleet.SparseEmbedding in fleet.prefetch(loader)",
    "collection": "fleet.SparseEmbeddings",
}
# What a variant needs of the package.
NEEDS = {"prefetch": "prefetch", "collection": "SparseEmbeddings"}
HEADER = (
    "what", "samples/s of both workers", "plain torch", "ratio", "by processor time",
    "processor time of a step, us: worker + servers; plain torch", "messages a step and server", "rows/s",
)  # fmt: skip
Block = dict[str, float]
Worker = dict[str, dict[str, list[Block]]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured in one job."""

    tables: int
    ids: int
    batches: Sequence[int]
    blocks: int
    seconds: float
    servers: int
    model: str = "clicks"
    samples: int = 0  # trained on before the blocks, for an AUC

    def settings(self, mode: str = "sync", variant: str = "") -> dict[str, Any]:
        """Returns the settings of a worker; geo is for plain SGD only."""
        measured = {"tables": self.tables, "ids": self.ids, "batches": self.batches}
        blocks = {"blocks": self.blocks, "seconds": self.seconds}
        learned = {"model": self.model, "samples": self.samples}
        return {
            **measured,
            **blocks,
            **learned,
            "mode": mode,
            "variant": variant,
            "rule": "SGD" if mode == "geo" else "Adagrad",
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this part."""
    group = parser.add_argument_group("tables", "flags of --only tables, beside --modes, --batches and --vocabulary")
    group.add_argument("--tables", type=int, nargs="+", default=[26], help="numbers of tables (default: 26)")
    group.add_argument("--servers", type=int, default=1, help="number of servers (default: 1)")
    group.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    group.add_argument("--torchrec", metavar="PYTHON", help="interpreter of an environment with torchrec 1.4.0")


def print_tables(args: argparse.Namespace) -> None:
    """Measures and prints the table."""
    blocks, seconds = (3, 1.0) if args.quick else (5, 2.0)
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; {blocks} blocks of {seconds:g} s of each kind")
    variants = [name for name in args.variants if hasattr(fleet, NEEDS.get(name, "fleet"))]
    for name in args.variants:
        if name not in variants:
            print(f"{VARIANTS[name]}: left out, this version has no fleet.{NEEDS[name]}")
    rows: list[Row] = []
    for num_tables in args.tables:
        num_ids = args.vocabulary // num_tables if args.vocabulary else 40_000
        sizes = args.batches or [100]
        case = Case(tables=num_tables, ids=num_ids, batches=sizes, blocks=blocks, seconds=seconds, servers=args.servers)
        if args.torchrec:
            rows += rows_of_job(case, TORCHREC, gloo_job(case, TORCHREC, "_tables_torchrec.py", args.torchrec))
        for mode in args.modes or MODES:
            for name in variants:
                workers = job("_tables_fleet.py", case.settings(mode, name), args.servers)
                rows += rows_of_job(case, f"{mode}, {VARIANTS[name]}", workers)
    print(markdown(HEADER, [row.cells(rows) for row in rows]))
    if not args.torchrec:
        print(f"{TORCHREC}: not measured, needs --torchrec PYTHON; _ps_tables.py says how to make its environment.")


def gloo_job(case: Case, what: str, script: str, python: str) -> list[Worker]:
    """Runs two workers of a script of this folder with the interpreter ``python``; returns what they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        settings = json.dumps({**case.settings(), "folder": folder})
        local = {"LOCAL_WORLD_SIZE": str(NUM_WORKERS), "OMP_NUM_THREADS": "1"}
        workers = []
        for rank in range(NUM_WORKERS):
            with Path(folder, f"log.{rank}").open("w") as log:
                command = [python, str(HERE / script), settings, str(rank)]
                environment = {**os.environ, **local, "LOCAL_RANK": str(rank)}
                workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        codes = [worker.wait() for worker in workers]
        if any(codes):
            logs = [Path(folder, f"log.{rank}").read_text()[-2000:] for rank in range(NUM_WORKERS)]
            raise SystemExit("\n".join([f"{what}: the workers ended with {codes}", *logs]))
        for plan in Path(folder).glob("plan.0"):
            print(f"{what}: {plan.read_text()}")
        return written(folder)


@dataclass(frozen=True)
class Row:
    """The blocks of both workers on the servers and in plain torch, in pairs."""

    what: str
    case: Case
    size: int
    served: list[tuple[Block, ...]]
    plain: list[tuple[Block, ...]]

    def rate(self, both: tuple[Block, ...]) -> float:
        """Returns the samples per second of both workers."""
        return sum(self.size * worker["steps"] / worker["wall_s"] for worker in both)

    def rows_per_processor_s(self, both: tuple[Block, ...]) -> float:
        """Returns the ids looked up per second of processor time of all processes."""
        return self.size * self.case.tables * 1e6 / job_us(both)

    def cells(self, rows: Sequence[Row]) -> list[str]:
        """Returns the cells of the row; those of fewer tables are among ``rows``."""
        rates = [[self.rate(both) for both in blocks] for blocks in (self.served, self.plain)]
        times = [[job_us(both) for both in blocks] for blocks in (self.served, self.plain)]
        own, servers = median(map(own_us, self.served)), median(map(servers_us, self.served))
        return [
            f"{self.case.tables} tables, batch {self.size}: {self.what}",
            spread(rates[0], 0),
            spread(rates[1], 0),
            spread(ratios(*rates), 2),
            spread(ratios(times[1], times[0]), 2),
            f"{own:.0f} + {servers:.0f}; {median(map(own_us, self.plain)):.0f}",
            self.messages(),
            self.rows_cell(rows),
        ]

    def messages(self) -> str:
        """Returns the messages that a worker sends a server in a step."""
        if "messages" not in self.served[0][0]:
            return "-"
        counts = [worker["messages"] / worker["steps"] / self.case.servers for both in self.served for worker in both]
        return f"{median(counts):.1f}"

    def rows_cell(self, rows: Sequence[Row]) -> str:
        """Returns the ids looked up per second, and the share of it that the smallest number of tables has."""
        rate = self.case.tables * median(map(self.rate, self.served))
        least = min(
            (row for row in rows if (row.what, row.size) == (self.what, self.size)), key=lambda row: row.case.tables
        )
        if least is self:
            return f"{rate / 1e3:.0f}k"
        by_clock = rate / least.case.tables / median(map(least.rate, least.served))
        by_processor = median(map(self.rows_per_processor_s, self.served)) / median(
            map(least.rows_per_processor_s, least.served)
        )
        return f"{rate / 1e3:.0f}k = {by_clock:.2f} of {least.case.tables} tables, {by_processor:.2f} by processor time"


def rows_of_job(case: Case, what: str, workers: list[Worker]) -> list[Row]:
    """Returns the rows of a job, and prints them at once, so that a long run shows where it is."""
    rows = []
    for size in case.batches:
        kinds = [
            list(zip(*(worker[str(size)][kind] for worker in workers), strict=True)) for kind in ("served", "plain")
        ]
        rows.append(Row(what, case, size, *kinds))
    for row in rows:
        print(" | ".join(row.cells(rows)[:6]) + f" | load {os.getloadavg()[0]:.1f}", flush=True)
    return rows


def job_us(both: tuple[Block, ...]) -> float:
    """Returns the processor time of all processes per step of a worker."""
    return own_us(both) + servers_us(both)


def own_us(both: tuple[Block, ...]) -> float:
    """Returns the processor time of the workers per step of a worker."""
    return 1e6 * sum(worker["own_s"] for worker in both) / sum(worker["steps"] for worker in both)


def servers_us(both: tuple[Block, ...]) -> float:
    """Returns the processor time of the servers, which worker 0 has read, per step of a worker."""
    return 1e6 * both[0].get("servers_s", 0.0) / sum(worker["steps"] for worker in both)
