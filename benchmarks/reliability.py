"""Measures what happens when things fail, beside torchrun with and without its store opt-out, in one run.

fleet's nodes meet on etcd; in the column "fleet, own store" they meet at the launcher of node 1, without etcd.

Nodes are network namespaces, so the rows of several nodes need root, ``ip`` and ``etcd``. From the repository root::

    python benchmarks/reliability.py                      # 20 kills, 5 of most other faults: about an hour
    python benchmarks/reliability.py --repeat-beside 1    # fewer tries for torchrun, which often takes its full 30 s
    python benchmarks/reliability.py --repeat 1           # a few minutes
    python benchmarks/reliability.py --only kill hang --launchers fleet

Each cell is ``successes/tries: median s (min-max)``; a try fails when the job ends, or does not train again within
30 s. Where workers start, ``launcher`` is the median until the last of them has said its first line: the rest is their
import of torch, the same under every launcher. The column of targets is what fleet promises.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from _reliability_jobs import (  # noqa: E402
    FLEET,
    FLEET_OWN,
    FLEETS,
    HERE,
    LAUNCHERS,
    TORCHRUN,
    Etcd,
    Job,
    Network,
    Took,
    all_gone,
)
from _table import markdown, spread  # noqa: E402

from tests.helpers import etcd as etcd_helper  # noqa: E402
from tests.helpers import namespaces  # noqa: E402

Result = Took | None
HANG_S = 3


class Bench:
    """One launcher's turn: makes jobs in fresh folders, on one machine or on the nodes."""

    def __init__(self, launcher: str, folder: Path, network: Network | None) -> None:
        self.launcher, self.network, self._folder, self._count = launcher, network, folder, 0
        self.secrets: list[str] = []

    @contextmanager
    def job(self, *, on_nodes: bool = False, workers: int = 1, code: int = -1) -> Iterator[Job]:
        """A job that is ended, and searched for the planted secret, when the block is left."""
        self._count += 1
        name = f"{self.launcher.replace(', ', '-').replace(' ', '-')}-{self._count}"
        network = self.network if on_nodes else None
        with Job(self.launcher, self._folder / name, network, workers=workers, code=code) as made:
            try:
                yield made
            finally:
                self.secrets += made.has_secret()


def kill_worker(bench: Bench, repeat: int) -> Iterator[Result]:
    """kill -9 of any of 4 workers, again and again in one job while it lives: seconds until all train."""
    left = repeat
    while left:
        with bench.job(workers=4) as job:
            job.start()
            if job.wait_training(0.0, 4) is None:
                return
            trained: Result = Took(0.0)
            while left and trained is not None:
                left -= 1
                since = time.time()
                os.kill(job.newest_pids()[random.randrange(4)], signal.SIGKILL)
                trained = job.wait_training(since, 4)
                yield trained


def worker_error(bench: Bench, repeat: int) -> Iterator[Result]:
    """A worker ends with code 7: seconds from its end until the launcher's; counts only when that ends with 7 too."""
    for _ in range(repeat):
        with bench.job(workers=4, code=7) as job:
            name = job.start()
            job.wait_training(0.0, 4)
            all_gone([job.newest_pids()[1]], 60)
            since = time.time()
            code = job.nodes[name].wait(60)
            yield Took(time.time() - since) if code == 7 else None


def launcher_killed(bench: Bench, repeat: int) -> Iterator[Result]:
    """kill -9 of the launcher: seconds until no worker runs; fails when one still does after 1 s."""
    for _ in range(repeat):
        with bench.job(workers=4) as job:
            name = job.start()
            job.wait_training(0.0, 4)
            os.kill(job.nodes[name].pid, signal.SIGKILL)
            yield all_gone(job.pids_of(name), 1.0)


def hung_worker(bench: Bench, repeat: int) -> Iterator[Result]:
    """SIGSTOP of a worker: seconds until it is gone; fleet is asked to notice it after HANG_S."""
    flags = [f"--heartbeat_timeout={HANG_S}"] if bench.launcher in FLEETS else []
    for _ in range(repeat):
        with bench.job(workers=2) as job:
            job.start(flags=flags)
            job.wait_training(0.0, 2)
            time.sleep(1.0)
            pid = job.newest_pids()[1]
            os.kill(pid, signal.SIGSTOP)
            yield all_gone([pid], HANG_S + 12.0)


def replaced(bench: Bench, repeat: int, lost: int) -> Iterator[Result]:
    """Node ``lost`` of 2 is killed, a replacement starts 5 s later: seconds from then until all train."""
    for _ in range(repeat):
        with bench.job(on_nodes=True) as job:
            names = [job.start(place, nodes="2") for place in (1, 2)]
            if job.wait_training(0.0, 2) is None:
                yield None
                continue
            job.kill_node(names[lost - 1])
            time.sleep(5.0)
            since = time.time()
            job.start(lost, name="replacement", nodes="2")
            yield job.wait_training(since, 2)


def node_lost(bench: Bench, repeat: int) -> Iterator[Result]:
    """The node that does not serve the meeting point is lost."""
    yield from replaced(bench, repeat, 2)


def master_lost(bench: Bench, repeat: int) -> Iterator[Result]:
    """The node is lost that serves torchrun's meeting point and fleet's own store; etcd is elsewhere.

    With its own store fleet promises an end: seconds until the launcher of the other node has ended with code 1.
    """
    if bench.launcher != FLEET_OWN:
        yield from replaced(bench, repeat, 1)
        return
    for _ in range(repeat):
        with bench.job(on_nodes=True) as job:
            names = [job.start(place, nodes="2") for place in (1, 2)]
            if job.wait_training(0.0, 2) is None:
                yield None
                continue
            since = time.time()
            job.kill_node(names[0])
            code = job.nodes[names[1]].wait(60)
            yield Took(time.time() - since) if code == 1 and all_gone(job.pids_of(names[1]), 1.0) else None


def of_three(bench: Bench, repeat: int, fault: Callable[[Job], None]) -> Iterator[Result]:
    """Three nodes of 2:3, then ``fault`` hits the third: seconds until the other two train."""
    for _ in range(repeat):
        with bench.job(on_nodes=True) as job:
            for place in (1, 2, 3):
                job.start(place, nodes="2:3")
            if job.wait_training(0.0, 3) is None:
                yield None
                continue
            since = time.time()
            fault(job)
            yield job.wait_training(since, 2)


def silent_loss(bench: Bench, repeat: int) -> Iterator[Result]:
    """The cable of a node is pulled: seconds until its worker is gone, as its launcher has to see to by itself."""
    assert bench.network is not None
    for _ in range(repeat):
        with bench.job(on_nodes=True) as job:
            for place in (1, 2, 3):
                job.start(place, nodes="2:3")
            if job.wait_training(0.0, 3) is None:
                yield None
                continue
            bench.network.pull_cable(3)
            try:
                yield all_gone(job.pids_of("node3"), 15.0)
            finally:
                bench.network.plug_in(3)


def silent_loss_train(bench: Bench, repeat: int) -> Iterator[Result]:
    """The same fault: seconds until the other two train."""
    network = bench.network
    assert network is not None
    for result in of_three(bench, repeat, lambda job: network.pull_cable(3)):
        network.plug_in(3)
        yield result


def scale_in(bench: Bench, repeat: int) -> Iterator[Result]:
    """SIGTERM to the launcher of the third node: seconds until the other two train."""

    def leave(job: Job) -> None:
        os.kill(job.nodes["node3"].pid, signal.SIGTERM)

    yield from of_three(bench, repeat, leave)


def scale_out(bench: Bench, repeat: int) -> Iterator[Result]:
    """A third node joins two of 2:3: seconds until all three train."""
    for _ in range(repeat):
        with bench.job(on_nodes=True) as job:
            for place in (1, 2):
                job.start(place, nodes="2:3")
            if job.wait_training(0.0, 2) is None:
                yield None
                continue
            since = time.time()
            job.start(3, nodes="2:3")
            yield job.wait_training(since, 3)


def start_of_three(bench: Bench, repeat: int) -> Iterator[Result]:
    """Three nodes of 2:3 start 0.6 s apart: seconds until all three train in one world, and no other was started."""
    for _ in range(repeat):
        with bench.job(on_nodes=True) as job:
            since = time.time()
            for place in (1, 2, 3):
                job.start(place, nodes="2:3")
                time.sleep(0.6)
            trained = job.wait_training(since, 3)
            yield trained if {event["world"] for event in job.started_since(0.0)} == {3} else None


# Name -> what the row says, fleet's target, whether it needs nodes, the measurement.
ROWS: dict[str, tuple[str, str, bool, Callable[[Bench, int], Iterator[Result]]]] = {
    "kill": ("kill -9 of one of 4 workers: all train", "20/20, launcher 0.5 s", False, kill_worker),
    "error": ("a worker exits 7: the launcher exits 7", "0.7 s", False, worker_error),
    "launcher": ("kill -9 of the launcher: no worker runs", "1 s", False, launcher_killed),
    "hang": (f"SIGSTOP of a worker: killed ({HANG_S} s configured)", f"{HANG_S + 5} s", False, hung_worker),
    "node": ("node 2 of 2 lost, replacement: all train", "6 s", True, node_lost),
    "master": ("node 1 of 2 lost, replacement: all train; own store: the job ends", "6 s", True, master_lost),
    "silent": (f"cable of node 3 pulled: its worker is gone ({LAUNCHERS[0]}: lease 3 s)", "8 s", True, silent_loss),
    "silent-train": ("the same: the other two train", "8 s", True, silent_loss_train),
    "in": ("SIGTERM to node 3 of 3: the other two train", "5 s", True, scale_in),
    "out": ("a third node joins: all three train", "4 s", True, scale_out),
    "start": ("3 nodes start 0.6 s apart, window 5 s: one world", "20/20", True, start_of_three),
}
OFTEN = ("kill", "start")
SAVE, SAVES = "save", 20  # times --repeat
ATTACKS = "attacks"  # a table of its own, four times --repeat
SAVERS = {FLEET: "fleet", TORCHRUN: "plain"}


def cell(results: list[Result]) -> str:
    """Returns ``successes/tries: median (min-max)``."""
    good = [one for one in results if one is not None]
    parts = [one.launcher_s for one in good if one.launcher_s is not None]
    times = f": {spread([one.all_s for one in good], 2)}" if good else ""
    return f"{len(good)}/{len(results)}{times}" + (f", launcher {median(parts):.2f}" if parts else "")


def saves(launcher: str, tries: int, folder: Path) -> str:
    """Returns ``lost/tries`` of kills while checkpoints are written; for torchrun as its tutorial writes them."""
    if launcher not in SAVERS:
        return ""
    inside = folder / f"saves-{SAVERS[launcher]}"
    inside.mkdir()
    words = [sys.executable, str(HERE / "_reliability_saves.py"), SAVERS[launcher], f"{tries}", str(inside)]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True)
    return f"{int(done.stdout)}/{tries} lost"


def measure(names: list[str], repeats: dict[str, int], folder: Path, network: Network | None) -> None:
    """Prints one row as soon as it is measured, and the table at the end; ``repeats`` is launcher -> tries."""
    rows, benches = [], {name: Bench(name, folder, network) for name in repeats}
    for name in names:
        if name != SAVE and network is None and ROWS[name][2]:
            continue
        if name == SAVE:
            cells = [saves(launcher, tries * SAVES, folder) for launcher, tries in repeats.items()]
            rows.append(["kill -9 while checkpoints are written: newest lost", "0/100", *cells])
        else:
            text, target, _, ask = ROWS[name]
            often = 4 if name in OFTEN else 1
            cells = [cell(list(ask(benches[launcher], tries * often))) for launcher, tries in repeats.items()]
            rows.append([text, target, *cells])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    secrets = [f"{len(benches[launcher].secrets)} files" for launcher in repeats]
    rows.append(["a planted secret in the environment: files that hold it", "0 files", *secrets])
    print(markdown(["fault", "target", *repeats], rows))


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="tries of a fault; four times as many of two rows")
    parser.add_argument("--repeat-beside", type=int, help="the same for the launchers beside fleet; default --repeat")
    names = [*ROWS, SAVE, ATTACKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="rows to measure")
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    arguments = parser.parse_args()
    beside = arguments.repeat if arguments.repeat_beside is None else arguments.repeat_beside
    repeats = {name: arguments.repeat if name in FLEETS else beside for name in arguments.launchers}
    if ATTACKS in arguments.only:
        arguments.only.remove(ATTACKS)
        words = [sys.executable, str(HERE / "_reliability_attacks.py"), "--tries", f"{4 * arguments.repeat}"]
        subprocess.run(words, check=True)
        if not arguments.only:
            return
    reason = etcd_helper.missing() or namespaces.missing()
    with tempfile.TemporaryDirectory() as name:
        if reason:
            print(f"Rows of several nodes are left out: {reason}", file=sys.stderr)
            measure(arguments.only, repeats, Path(name), None)
            return
        with Network(3) as network:
            address = network.address(0)
            with Etcd(Path(name) / "etcd", host=address, port=2379, inside=network.inside(0)):
                measure(arguments.only, repeats, Path(name), network)


if __name__ == "__main__":
    main()
