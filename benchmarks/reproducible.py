"""Measures what ``strategy.reproducible`` takes of an update, beside plain data parallel with the same batches.

Run from the repository root::

    python benchmarks/reproducible.py            # 2, 3 and 4 workers, some five minutes on two cores
    python benchmarks/reproducible.py --quick    # tiny models and few updates: shows that it runs

V batches make an update and N workers share them, as evenly as possible. Each form is a job of its own; all of them
run at once and take turns, some updates each, so that a slow moment of the machine hits all. "data parallel" runs each
worker's batches under ``no_sync()``, all but the last, so that a worker may have fewer than another;
"gradient_merge" is the option, where N divides V. One thread for each process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fleet
from fleet.job.logical_workers import hosted_ranks
from fleet.strategies.reproducible.tree import whole_nodes

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]
from _process import forget_peak, resident, sent_bytes  # noqa: E402
from _table import markdown, ratios, spread  # noqa: E402
from gpt.model import GptConfig, make_gpt, next_token_loss  # noqa: E402
from resnet.model import ResNet  # noqa: E402

PLAIN, MERGED, OURS = "data parallel", "gradient_merge", "reproducible"
CASES = {2: (8, 6), 4: (8, 6), 3: (8,)}  # the workers, and the batches of an update
MIB = 2**20
Update = Callable[[], None]


# ---- a worker -------------------------------------------------------------------------------------------------------


def gpt(hidden: int, layers: int, rows: int, length: int) -> tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]:
    """Returns the GPT of the example, its loss, and a batch for each of 8 logical workers."""
    net = make_gpt(GptConfig(hidden=hidden, layers=layers, length=length))
    tokens = torch.randint(256, (8, rows, length + 1))
    return net, next_token_loss, [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]


def resnet(width: int, rows: int) -> tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]:
    """Returns the ResNet-18 of the example for images of 16x16, its loss, and a batch for each of 8 logical workers."""
    net = ResNet(18, 10, stem="small", width=width)
    batches = [(torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))) for _ in range(8)]
    return net, nn.functional.cross_entropy, batches


MODELS: dict[str, Callable[..., tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]]] = {"ResNet": resnet, "GPT": gpt}


def make_update(form: str, num_workers: int, model: str, num_batches: int, sizes: list[int]) -> Update:
    """Returns one update of a model with ``sizes``, trained in ``form``."""
    strategy = fleet.DistributedStrategy()
    if form == OURS:
        strategy.reproducible = True
        strategy.reproducible_configs = {"logical_workers": num_batches}
    if form == MERGED:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": num_batches // num_workers}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, loss_of, batches = MODELS[model](*sizes)
    adam = model == "GPT"
    inner = torch.optim.AdamW(net.parameters(), 1e-3) if adam else torch.optim.SGD(net.parameters(), 1e-3, 0.9)
    optimizer = fleet.distributed_optimizer(inner)
    trained = fleet.distributed_model(net)
    own = hosted_ranks(num_batches, num_workers, fleet.worker_index())

    def by_turns(ranks: Callable[[], Iterable[int]]) -> None:
        for rank in ranks():
            x, y = batches[rank]
            loss_of(trained(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    def by_no_sync() -> None:
        for rank in own:
            x, y = batches[rank]
            with trained.no_sync() if rank != own[-1] else nullcontext():
                (loss_of(trained(x), y) * (num_workers / num_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    if form == PLAIN:
        return by_no_sync
    return lambda: by_turns(fleet.elastic.logical_ranks if form == OURS else lambda: own)


def run(update: Update, updates: int) -> dict[str, float]:
    """Returns what an update takes: seconds on the wall and of this process, and bytes that this process sends."""
    dist.barrier()
    sent = sent_bytes()
    wall = time.perf_counter()
    processor = time.process_time()
    for _ in range(updates):
        update()
    processor = time.process_time() - processor
    dist.barrier()
    wall = time.perf_counter() - wall
    used = {"wall": wall, "processor": processor, "sent": sent_bytes() - sent}
    return {key: amount / updates for key, amount in used.items()}


def peak(make: Callable[[list[int]], Update], small: list[int], sizes: list[int]) -> dict[str, int]:
    """Returns the peak of resident memory over the start, without what is made once."""
    run(make(small), 2)
    gc.collect()
    before = resident("VmRSS")
    forget_peak()
    run(make(sizes), 3)
    return {"peak": resident("VmHWM") - before}


def worker(form: str, num_workers: int, place: str) -> None:
    """Answers the questions that come through the socket at ``place``, until it is closed."""
    torch.set_num_threads(1)
    update: Any = None
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        lines = connection.makefile("rw")
        for line in lines:
            asked = json.loads(line)
            reply: Any = {}
            if "begin" in asked:
                update = make_update(form, num_workers, *asked["begin"])
            elif "peak" in asked:
                model, num_batches, small, sizes = asked["peak"]
                reply = peak(partial(make_update, form, num_workers, model, num_batches), small, sizes)
            else:
                reply = run(update, asked["run"])
            lines.write(json.dumps(reply) + "\n")
            lines.flush()


# ---- the jobs, in turns ----------------------------------------------------------------------------------------------


class Job:
    """The workers of one form, which wait until they are asked for something."""

    def __init__(self, form: str, num_workers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.form = form
        place = f"{self._folder.name}/turns"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(place)
        self._server.listen(num_workers)
        self._num_workers = num_workers
        self._connections: list[tuple[socket.socket, Any]] = []
        launch = [sys.executable, "-m", "fleet.launch", f"--nproc_per_node={num_workers}"]
        command = [*launch, f"--log_dir={self._folder.name}/log", __file__, form, str(num_workers), place]
        quiet = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._output = open(f"{self._folder.name}/output", "w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, env=quiet, stdout=self._output, stderr=subprocess.STDOUT)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for connection, lines in self._connections:
            lines.close()
            connection.close()
        self._server.close()
        if kind is not None:
            self._process.terminate()
        self._process.wait(60)
        self._output.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        self._server.settimeout(5)
        while len(self._connections) < self._num_workers:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                if self._process.poll() is not None:
                    self._fail()
                continue
            connection.settimeout(300)
            self._connections.append((connection, connection.makefile("rw")))

    def _fail(self) -> None:
        self._output.seek(0)
        raise SystemExit(f"A worker of {self.form!r} has ended:\n{self._output.read()[-3000:]}")

    def ask(self, **what: Any) -> list[Any]:
        """Returns every worker's answer."""
        self._accept()
        for _, lines in self._connections:
            lines.write(json.dumps(what) + "\n")
            lines.flush()
        answers = [lines.readline() for _, lines in self._connections]
        if not all(answers):
            self._fail()
        return [json.loads(answer) for answer in answers]


def in_turns(jobs: list[Job], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Returns, by form, each block's wall time of the slowest worker, processor time and bytes of all workers."""
    found: dict[str, dict[str, list[float]]] = {job.form: {"wall": [], "processor": [], "sent": []} for job in jobs}
    for block in range(args.blocks + 1):
        turn = block % len(jobs)
        for job in jobs[turn:] + jobs[:turn]:
            answers = job.ask(run=args.updates)
            if block:  # the first block warms up
                for key, total in (("wall", max), ("processor", sum), ("sent", sum)):
                    found[job.form][key].append(total(answer[key] for answer in answers))
    return found


def sizes_of(model: str, args: argparse.Namespace) -> list[int]:
    """Returns the sizes of a model and of its batches."""
    if args.quick:
        return [32, 2, 2, 16] if model == "GPT" else [8, 4]
    return [128, 4, args.rows, 64] if model == "GPT" else [32, args.images]


def held_bytes(model: str, args: argparse.Namespace) -> list[int]:
    """Returns the bytes of the gradients and of the buffers of a model."""
    net, _, _ = MODELS[model](*sizes_of(model, args))
    return [sum(t.numel() * t.element_size() for t in some) for some in (net.parameters(), net.buffers())]


def sent_by_formula(num_batches: int, num_workers: int, gradients: int, buffers: int) -> tuple[float, float]:
    """Returns the bytes that all workers send in an update: by the tree, and by a ring."""
    blocks = [hosted_ranks(num_batches, num_workers, host) for host in range(num_workers)]
    nodes = sum(len(list(whole_nodes(num_batches, block))) for block in blocks)
    others = num_workers - 1
    tree = others * gradients * (nodes + num_workers) / num_workers
    return tree + others * buffers, 2 * others * gradients + others * buffers


def case_rows(
    model: str, num_batches: int, num_workers: int, found: dict[str, dict[str, list[float]]], args: argparse.Namespace
) -> tuple[list[str], list[str]]:
    """Returns the rows of one case: of times, and of bytes."""
    times = [model, f"{num_batches} on {num_workers}", f"{1e3 * median(found[PLAIN]['processor']):.0f}"]
    for beside in (PLAIN, MERGED):
        for key in ("processor", "wall"):
            known = beside in found
            times.append(spread(ratios(found[OURS][key], found[beside][key])) if known else "")
    times.append("1.15" if num_batches & (num_batches - 1) == 0 and num_workers & (num_workers - 1) == 0 else "1.3")
    gradients, buffers = held_bytes(model, args)
    tree, ring = sent_by_formula(num_batches, num_workers, gradients, buffers)
    sent = [median(found[OURS]["sent"]), tree, median(found[PLAIN]["sent"]), ring]
    return times, [*times[:2], f"{gradients / 1e6:.2f}", *(f"{size / 1e6:.2f}" for size in sent)]


def times_and_bytes(args: argparse.Namespace) -> str:
    """Returns the table of times and the one of bytes."""
    times, sent = [], []
    for num_workers in args.workers:
        cases = CASES[num_workers]
        forms = [PLAIN, OURS] if all(v % num_workers for v in cases) else [PLAIN, MERGED, OURS]
        with ExitStack() as stack:
            jobs = [stack.enter_context(Job(form, num_workers)) for form in forms]
            for model in args.models:
                for num_batches in cases:
                    taking = [job for job in jobs if job.form != MERGED or num_batches % num_workers == 0]
                    for job in taking:
                        job.ask(begin=[model, num_batches, sizes_of(model, args)])
                    found = in_turns(taking, args)
                    rows = case_rows(model, num_batches, num_workers, found, args)
                    times.append(rows[0])
                    sent.append(rows[1])
                    print(" | ".join(rows[0]), file=sys.stderr, flush=True)
    header = ["model", "V on N", "processor of data parallel, ms", "over it", "wall over it", "over gradient_merge"]
    sizes = ["model", "V on N", "gradients, MB", "sent by all, MB", "formula", "by data parallel", "formula of a ring"]
    return f"{markdown([*header, 'wall over it', 'asked'], times)}\n\n{markdown(sizes, sent)}"


def memory(args: argparse.Namespace) -> str:
    """Returns the table of peaks: those of the worst worker, for a model whose gradients are large."""
    sizes = [64, 2, 1, 16] if args.quick else [512, 6, 1, 32]
    net, _, _ = gpt(*sizes)
    gradient = sum(p.numel() * 4 for p in net.parameters()) / MIB
    rows = []
    for num_workers in args.workers:
        num_batches = CASES[num_workers][0]
        peaks = {}
        for form in (PLAIN, MERGED, OURS):
            if form != MERGED or num_batches % num_workers == 0:
                with Job(form, num_workers) as job:
                    found = job.ask(peak=["GPT", num_batches, [32, 2, 1, 16], sizes])
                peaks[form] = max(answer["peak"] for answer in found) / MIB
        share = len(hosted_ranks(num_batches, num_workers, 0))
        more = (peaks[OURS] - peaks[PLAIN]) / gradient
        row = [f"{num_batches} on {num_workers}", f"{gradient:.0f}"]
        row += [f"{peaks[form]:.0f}" if form in peaks else "" for form in (PLAIN, MERGED, OURS)]
        rows.append([*row, f"{more:.2f}", f"{(share - 1).bit_length() + 1}"])
    forms = [f"peak, MiB: {form}" for form in (PLAIN, MERGED, OURS)]
    header = ["V on N", "gradients, MiB", *forms, "more than data parallel, gradients", "sums kept, at most"]
    return markdown(header, rows)


TABLES = {"times": times_and_bytes, "memory": memory}


def main() -> None:
    """Prints the tables; or answers as a worker."""
    if "PADDLE_TRAINER_ID" in os.environ:
        worker(sys.argv[1], int(sys.argv[2]), sys.argv[3])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9, help="turns of each form that count")
    parser.add_argument("--updates", type=int, default=2, help="updates in a turn")
    parser.add_argument("--rows", type=int, default=4, help="rows of a batch of GPT")
    parser.add_argument("--images", type=int, default=32, help="images of a batch of ResNet")
    parser.add_argument("--workers", nargs="+", type=int, choices=list(CASES), default=list(CASES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--quick", action="store_true", help="tiny models and few updates")
    args = parser.parse_args()
    if args.quick:
        args.blocks = args.updates = 1
    began = time.perf_counter()
    print(f"load of the machine at the start: {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n")
    for name in args.only:
        print(TABLES[name](args), end="\n\n", flush=True)
    print(f"{time.perf_counter() - began:.0f} s; load at the end: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
