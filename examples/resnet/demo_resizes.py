"""Trains twice, undisturbed in one process and in an elastic job that is resized, and compares the two bit by bit.

Each launcher stands for a node with one worker. To grow, the job gets more of them; to shrink, some are killed with
SIGKILL, in the middle of whatever they do. What comes after ``--`` goes to ``train_fleet_reproducible.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from plot_resizes import differences, draw, read_updates, stages

SCRIPT = Path(__file__).parent / "train_fleet_reproducible.py"
DEFAULTS = ["--batch-size", "8", "--width", "8", "--epochs", "6"]
LIMIT_S = 600.0  # for the updates of one size of the job


class Nodes:
    """The launchers of an elastic job on this machine; the first one holds the store and stays.

    Args:
        folder: for logs.
        most: the largest number of nodes.
        options: of the training script.
    """

    def __init__(self, folder: Path, most: int, options: list[str]) -> None:
        self.folder, self.most, self.options = folder, most, options
        self.running: list[subprocess.Popen[bytes]] = []
        self._started = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]

    def resize(self, number: int) -> None:
        """Starts launchers, or kills the last ones, until there are ``number``."""
        while len(self.running) > number:
            node = self.running.pop()
            node.kill()
            node.wait()
        while len(self.running) < number:
            self._started += 1
            log = self.folder / f"node{self._started}"
            log.mkdir()
            line = [sys.executable, "-m", "fleet.launch", f"--master=127.0.0.1:{self._port}", f"--nnodes=1:{self.most}"]
            line += ["--nproc_per_node=1", "--elastic_timeout=2", "--log_dir", str(log), str(SCRIPT), *self.options]
            with (log / "output").open("wb") as output:
                self.running.append(subprocess.Popen(line, stdout=output, stderr=subprocess.STDOUT))
            if len(self.running) == 1:  # the first one that opens the port holds the store
                self._wait_for_text("Waiting peer start", log / "output")

    def _wait_for_text(self, text: str, output: Path) -> None:
        deadline = time.monotonic() + LIMIT_S
        while text not in output.read_text():
            if self.has_ended or time.monotonic() > deadline:
                raise SystemExit(f"The first launcher did not start; see {output}.")
            time.sleep(0.05)

    @property
    def has_ended(self) -> bool:
        """Whether the job is over; raises SystemExit where it has failed."""
        code = self.running[0].poll()
        if code:
            raise SystemExit(f"The job failed; its logs are in {self.folder}.")
        return code == 0

    def wait_for(self, history: Path, workers: int, updates: int) -> None:
        """Returns when ``updates`` more updates were made by ``workers`` workers, or the job has ended."""
        deadline = time.monotonic() + LIMIT_S
        lines = history.read_text().splitlines() if history.exists() else []
        seen = len(lines)
        while not self.has_ended:
            lines = history.read_text().splitlines()[seen:] if history.exists() else []
            if sum(f'"workers": {workers}}}' in line for line in lines) >= updates:
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"{workers} workers made no {updates} updates; the logs are in {self.folder}.")
            time.sleep(0.05)

    def close(self) -> None:
        """Waits for the launchers when the job is over, and ends them otherwise."""
        is_over = bool(self.running) and self.running[0].poll() == 0
        for node in self.running:
            if is_over:
                with contextlib.suppress(subprocess.TimeoutExpired):  # one that came too late waits for others
                    node.wait(10)
            node.terminate()
            node.wait(60)


def train_alone(folder: Path, options: list[str]) -> str:
    """Trains in one process; returns its output."""
    done = subprocess.run([sys.executable, str(SCRIPT), *options], stdout=subprocess.PIPE, text=True, check=False)
    (folder / "one.txt").write_text(done.stdout)
    if done.returncode:
        raise SystemExit("Training in one process failed.")
    return done.stdout


def train_resized(nodes: Nodes, sizes: list[int], history: Path, updates: int) -> None:
    """Trains in an elastic job that gets each of the ``sizes`` and makes about so many ``updates`` with it."""
    try:
        for size in sizes:
            if nodes.running and nodes.has_ended:
                break
            print(f"the job gets {size} node(s)", flush=True)
            nodes.resize(size)
            nodes.wait_for(history, size, updates)
        while not nodes.has_ended:
            time.sleep(0.1)
    finally:
        nodes.close()


def digest_in(output: str) -> str:
    """Returns the digest that the training script prints at its end."""
    (found,) = set(re.findall(r"^Weights and optimizer state: (\w+)$", output, re.MULTILINE))
    return str(found)


def main() -> None:
    """Runs both, draws them, and ends with status 1 where a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for logs, checkpoints and the picture; what is there is replaced")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 1, 4], help="workers (default: 2 3 1 4)")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:cut])
    chosen = sys.argv[cut + 1 :] or DEFAULTS
    folder: Path = args.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    one, resized = folder / "one.jsonl", folder / "resized.jsonl"

    def options(name: str, history: Path) -> list[str]:
        return [*chosen, "--checkpoint", str(folder / name), "--history", str(history)]

    print("one process trains", flush=True)
    alone = digest_in(train_alone(folder, options("checkpoint1", one)))
    undisturbed, _ = read_updates(one)
    nodes = Nodes(folder, max(args.sizes), options("checkpoints", resized))
    train_resized(nodes, args.sizes, resized, len(undisturbed) // (2 * len(args.sizes)))
    found, again = read_updates(resized)
    draw(undisturbed, found, folder / "resizes.png")
    together = digest_in((folder / "node1" / "output").read_text())
    parts = (f"{workers} for {last - first + 1} updates" for first, last, workers in stages(found))
    print("workers: " + ", ".join(parts))
    print(f"updates made again after a kill: {again}, each with the same loss")
    differing = sum(difference != 0 for difference in differences(undisturbed, found))
    print(f"losses that differ from the undisturbed run: {differing} of {len(found)}")
    print(f"weights and optimizer state: {'the same bits' if together == alone else 'DIFFERENT'}")
    if differing or together != alone:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
