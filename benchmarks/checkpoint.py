"""Measures checkpoints, paired in one run: the stop of training, bytes read, the rate of writing, and memory.

Run from the repository root, on an otherwise idle machine::

    python benchmarks/checkpoint.py                          # about ten minutes, 2 GB of disk
    python benchmarks/checkpoint.py --only memory --MB 10000  # 10 GB of state: 14 GB of memory, 10 GB of disk
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from _table import markdown, ratios, spread  # noqa: E402

Row = list[str]
SHARDING = {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": 2}}
SHARDING3 = {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": 3}}
MP = {"tensor_parallel": True, "hybrid_configs": {"mp_degree": 2}}
PP = {"pipeline": True, "hybrid_configs": {"pp_degree": 2}}
DP: dict[str, Any] = {}


def run(what: str, workers: int, MB: float, rounds: int, folder: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs one job of ``_checkpoint_steps.py`` and returns what each worker has measured."""
    result = Path(folder) / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "fleet.launch", f"--nproc_per_node={workers}", f"--log_dir={folder}/log"]
    script = [str(HERE / "_checkpoint_steps.py"), what, str(MB), str(rounds), folder, str(result), json.dumps(options)]
    # Otherwise freed tensors stay in the process, and what a save or a load takes hides in their place.
    beside = {**os.environ, "MALLOC_MMAP_THRESHOLD_": f"{1 << 20}"} if what == "memory" else None
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=1500, check=False, env=beside)
    if done.returncode or not result.exists():
        raise SystemExit(f"{what}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def slowest(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns each time of the worker that took longest."""
    return {name: [max(times) for times in zip(*(one[name] for one in found), strict=True)] for name in found[0]}


def stops(MB: float, rounds: int) -> list[Row]:
    """How long training stops, over copies of the worker's own state."""
    rows = []
    for name, options in (("dp 2", DP), ("sharding stage 3, 2", SHARDING3)):
        with tempfile.TemporaryDirectory() as folder:
            times = slowest(run("stops", 2, MB, rounds, folder, options))
        for form, called in (("fleet", "save(asynchronous=True)"), ("dcp", "DCP async_save"), ("torch", "torch.save")):
            over = ratios(times[form], times["memcpy"]), ratios(times[form], times["memcpy, fresh"])
            bound = "<= 1.2" if form == "fleet" else ""
            what = f"stop of training, {name}: {called}"
            rows.append([what, f"{median(times[form]) * 1e3:.0f} ms", f"{spread(over[0], 2)} of a memcpy; "
                f"{spread(over[1], 2)} of one into fresh memory", bound])  # fmt: skip
    return rows


def reads(MB: float, rounds: int) -> list[Row]:
    """Bytes read over the bytes of the worker's parts, the worker that reads most."""
    rows = []
    cases = [("dp 2", 2, DP, "dp 2", 2, DP), ("dp 2", 2, DP, "mp 2", 2, MP), ("mp 2", 2, MP, "mp 2", 2, MP),
        ("sharding stage 2", 2, SHARDING, "one process", 1, DP), ("sharding stage 3", 2, SHARDING3, "dp 2", 2, DP),
        ("dp 2", 2, DP, "sharding stage 3", 2, SHARDING3), ("pp 2", 2, PP, "pp 2", 2, PP),
        ("pp 2", 2, PP, "one process", 1, DP), ("one process", 1, DP, "pp 2", 2, PP)]  # fmt: skip
    for saved, savers, theirs, loaded, loaders, mine in cases:
        with tempfile.TemporaryDirectory() as folder:
            run("save", savers, MB, 1, folder, theirs)
            found = run("reads", loaders, MB, 1, folder, mine)
        most = {name: max(one[name] for one in found) for name in found[0]}
        both = f"{most['sums']:.3f}; {most['no sums']:.3f} with check_sums=False"
        rows.append([f"bytes read, saved on {saved}, loaded on {loaded}", f"{most['sums, s']:.2f} s", both, "<= 1.02"])
    return rows


def writes(MB: float, rounds: int) -> list[Row]:
    """The rate of writing over that of a plain sequential write."""
    with tempfile.TemporaryDirectory() as folder:
        times = slowest(run("writes", 1, MB, rounds, folder, DP))
    return [
        [f"rate of writing, {name}", f"{median(times[form]) * 1e3:.0f} ms", spread(ratios(times["plain"], times[form])),
            ">= 0.9"]
        for form, name in (("fleet", "save()"), ("asynchronous", "save(asynchronous=True) and wait()"))
    ]  # fmt: skip


def memory(MB: float, rounds: int) -> list[Row]:
    """Memory beyond the state, the worker that takes most; nothing but the state is held."""
    with tempfile.TemporaryDirectory() as folder:
        found = run("memory", 2, MB, 1, folder, SHARDING3)
    state = sum(one["state"] for one in found) / 1e9
    return [
        [f"memory beyond the state, {name}, {state:.1f} GB on 2 workers", "", f"{max(one[form] for one in found):.3f}",
            bound]
        for form, name, bound in (("asynchronous", "save(asynchronous=True)", "<= 0.3"), ("save", "save()", "<= 0.3"),
            ("load", "load()", "<= 0.1"))
        if form in found[0]  # a machine without room for the copy leaves the asynchronous save out
    ]  # fmt: skip


PARTS: dict[str, Callable[[float, int], list[Row]]] = {
    "stops": stops,
    "reads": reads,
    "writes": writes,
    "memory": memory,
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--MB", type=float, default=600.0, help="of the state on all workers")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rows = [row for name in arguments.only for row in PARTS[name](arguments.MB, arguments.rounds)]
    print(markdown(["measurement", "median", "ratio, median (min-max)", "asked"], rows))


if __name__ == "__main__":
    main()
