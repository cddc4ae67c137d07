"""Measures what seals cost on the parameter server's wire: two servers, the messages of one without seals.

    python benchmarks/_ps_seals.py [--blocks 20] [--rows 1000000]

A step pulls the rows of a batch and pushes a gradient for each, as in ``_ps_wire.py``. Blocks of steps go to the one
and to the other server in turn; printed is the median over the pairs of rows per second with seals to those without,
and the same by the processor time of client and server. ``--json`` adds a line for ``ps.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from _ps_wire import CONFIG, DIM, SECRET, batches, fill, processor_s, serve

from fleet.ps.client.client import Client, Gradient
from fleet.ps.client.client_config import ClientConfig
from fleet.ps.wire import sealed as _sealed


class NoSeals:
    """In place of the seals of a connection: the same bytes on the wire, and nothing computed."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def sent(self, *parts: object) -> bytes:
        """Returns an empty seal."""
        return bytes(_sealed.SEAL_BYTES)

    received = sent


def without_seals() -> None:
    """Makes every connection of this process one without seals."""
    _sealed.MessageSeals = NoSeals  # type: ignore[assignment, misc]
    _sealed.Sealed._covered = lambda self, buffers, size: buffers  # type: ignore[method-assign]


class Side:
    """A server process and a client of it."""

    def __init__(self, seals: bool, rows: int) -> None:
        settings = {"endpoint": "127.0.0.1:0", "level": 0}
        command = [sys.executable, __file__, "--server", json.dumps(settings), *([] if seals else ["--no-seals"])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        endpoint = self.process.stdout.readline().split()[-1]
        kept = _sealed.MessageSeals, _sealed.Sealed._covered
        if not seals:
            without_seals()
        self.client = Client(ClientConfig(endpoints=[endpoint], secret=SECRET, heartbeat=False), notify=print)
        self.client.open()
        if not seals:
            line = self.client._links[0]._connection
            assert line is not None
            line._covered = lambda buffers, size: buffers  # type: ignore[method-assign]
        _sealed.MessageSeals, _sealed.Sealed._covered = kept  # type: ignore[misc, method-assign]
        self.client.create_tables({0: CONFIG})
        fill(lambda ids, zeros: self.client.wait(self.client.add({0: Gradient(ids, zeros)})), rows)

    def block(self, keys: list[Any], gradients: list[Gradient], out: list[Any], steps: int) -> tuple[float, float]:
        """Returns the seconds of so many steps, and the processor seconds of both ends."""
        cpu, own, began = processor_s(self.process.pid), time.process_time(), time.perf_counter()
        for step in range(steps):
            at = step % len(keys)
            self.client.wait(self.client.pull({0: keys[at]}, out={0: out[at]}))
            self.client.wait(self.client.push({0: gradients[at]}))
        wall = time.perf_counter() - began
        return wall, time.process_time() - own + processor_s(self.process.pid) - cpu

    def close(self) -> None:
        """Ends both."""
        self.client.stop_servers()
        self.client.close()
        self.process.communicate()


def compare(sides: list[Side], keys: list[Any], blocks: int) -> dict[str, float]:
    """Returns milliseconds of a step with seals and without, and the shares that are left with seals."""
    gradients = [Gradient(batch, np.full((len(batch), DIM), 0.01, np.float32)) for batch in keys]
    out = [np.empty((len(batch), DIM), np.float32) for batch in keys]
    steps = 40 if len(keys[0]) > 1000 else 1000
    times: list[list[tuple[float, float]]] = [[], []]
    for number in range(blocks + 1):  # the first warms up
        for side in (0, 1) if number % 2 else (1, 0):
            times[side].append(sides[side].block(keys, gradients, out, steps))
    pairs = list(zip(times[0][1:], times[1][1:], strict=True))
    share, processor_share = (
        statistics.median(plain[kind] / max(sealed[kind], 1e-9) for sealed, plain in pairs) for kind in (0, 1)
    )
    sealed_ms, plain_ms = (1000 * statistics.median(wall for wall, _ in side[1:]) / steps for side in times)
    rows = statistics.mean(map(len, keys))
    print(
        f"about {rows:.0f} ids, {sealed_ms:.3f} ms with seals, {plain_ms:.3f} ms without: {share:.3f} of the rows per "
        f"second, {processor_share:.3f} by processor time",
        flush=True,
    )
    return {
        "rows": rows,
        "sealed_ms": sealed_ms,
        "plain_ms": plain_ms,
        "share": share,
        "processor_share": processor_share,
    }


def main() -> None:
    """Measures large and small batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--no-seals", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        if options.no_seals:
            without_seals()
        serve(json.loads(options.server))
        return
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, {options.rows} rows of dim {DIM}, Adagrad")
    full = batches(options.rows, 106_496)
    found: list[dict[str, Any]] = []
    sides = [Side(seals, options.rows) for seals in (True, False)]
    for name, keys in (("full", full), ("300", [batch[:300] for batch in full])):
        found.append({"ids": name, **compare(sides, keys, options.blocks)})
    for side in sides:
        side.close()
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
