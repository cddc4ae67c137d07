"""Measures hybrid parallelism, paired in one run: tensor parallel and pipeline steps, the bubble, bytes and memory.

Run from the repository root, on an otherwise idle machine::

    python benchmarks/hybrid.py               # about ten minutes
    python benchmarks/hybrid.py --only mp pp  # some rows
    python benchmarks/hybrid.py --plot docs/guides/hybrid.png  # no measurement: draws the orders of a pipeline
"""

from __future__ import annotations

import argparse
import json
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


def run(what: str, size: str, workers: int, count: int) -> dict[str, Any]:
    """Runs one job of ``_hybrid_steps.py`` and returns what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "fleet.launch", f"--nproc_per_node={workers}", f"--log_dir={folder}/log"]
        script = [str(HERE / "_hybrid_steps.py"), what, size, str(count), str(result)]
        done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=500)
        if done.returncode or not result.exists():
            raise SystemExit(f"{what} {size}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def against(what: str, times: dict[str, list[float]], bounds: dict[str, float]) -> list[Row]:
    """Returns a row for each other form: our median, the paired ratio, the bound."""
    ours = times["fleet"]
    return [
        [f"{what}, over {name}", f"{median(ours) * 1e3:.1f} ms", spread(ratios(ours, times[name])), f"<= {bound}"]
        for name, bound in bounds.items()
    ]


def tensor_parallel() -> list[Row]:
    """mp2 against the same by hand and parallelize_module, small and big."""
    rows = []
    for size, bound in (("small", 0.35), ("big", 0.60)):
        times = run("mp", size, 2, 25 if size == "small" else 12)["times"]
        named = {"fleet": times["fleet"], "the same by hand": times["hand"], "parallelize_module": times["torch"]}
        rows += against(f"mp2 step, {size} GPT", named, {"the same by hand": 1.05, "parallelize_module": bound})
    return rows


def pipeline() -> list[Row]:
    """pp2 against torch's Schedule1F1B."""
    rows = []
    for size in ("small", "big"):
        found = run("pp", size, 2, 20 if size == "small" else 8)
        times = {"fleet": found["times"]["fleet"], "torch's Schedule1F1B": found["times"]["torch"]}
        rows += against(f"1F1B step, pp2, 8 micro-batches, {size} GPT", times, {"torch's Schedule1F1B": 1.05})
        over = {name: found["first"][name] / median(found["times"][name]) for name in ("fleet", "torch")}
        rows.append(
            [
                f"first step over later steps, {size} GPT",
                f"{found['first']['fleet'] * 1e3:.1f} ms",
                f"{over['fleet']:.2f} (torch {over['torch']:.2f})",
                "<= 1.1",
            ]
        )
    return rows


def bubble() -> list[Row]:
    """p = 4, n = 8, stages that sleep 40 ms forward and 80 ms backward."""
    rows = []
    for what, bound, theory in (("bubble", 0.30, 3 / 11), ("interleaved", 0.20, 3 / 19)):
        found = run(what, "small", 4, 5)
        shares = [1 - found["busy"] / seconds for seconds in found["times"]["fleet"]]
        name = "1F1B" if what == "bubble" else "interleaved, 2 chunks"
        middle = median(found["times"]["fleet"]) * 1e3
        rows.append([f"bubble, {name} (theory {theory:.3f})", f"{middle:.0f} ms", spread(shares), f"<= {bound:.2f}"])
    return rows


def overlap() -> list[Row]:
    """The exchange over dp during the last micro-batch: pp2 x dp2, layers that sleep, a slow wire."""
    times = run("overlap", "small", 4, 8)["times"]
    by_turn = zip(times["off"], times["on"], times["none"], strict=True)
    shares = [(off - on) / (off - none) for off, on, none in by_turn]
    middles = ", ".join(f"{name} {median(times[name]) * 1e3:.0f}" for name in ("off", "on", "none"))
    what = "dp exchange hidden by dp_comm_overlap, pp2 x dp2, slowed wire"
    return [[what, f"{middles} ms", spread(shares), ">= 0.70"]]


def sequences() -> list[Row]:
    """Sequence parallel against torch's SequenceParallel."""
    rows = []
    for size in ("small", "big"):
        times = run("sequence", size, 2, 15 if size == "small" else 8)["times"]
        named = {"fleet": times["fleet"], "parallelize_module + SequenceParallel": times["torch"]}
        rows += against(
            f"sequence-parallel step, mp2, {size} GPT", named, {"parallelize_module + SequenceParallel": 0.5}
        )
    return rows


def held() -> list[Row]:
    """Bytes that the calls of a step hand over, and bytes of parameters and optimizer state."""
    rows = []
    for what, name in (("mp_bytes", "summed over mp2"), ("pp_bytes", "activations sent by stage 0 of 2")):
        found = run(what, "small", 2, 1)
        share = found["counted"] / found["formula"]
        rows.append([f"bytes a step, {name}, small GPT", f"{found['counted']}", f"{share:.4f} of the formula", "1"])
    found = run("memory", "big", 4, 1)
    share = found["held"] * 4 / found["whole"]
    held_MB = f"{found['held'] / 1e6:.2f} MB"
    rows.append(["parameters and AdamW state, mp2 x pp2, big GPT", held_MB, f"{share:.3f} of P / 4", "<= 1.02"])
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {
    "mp": tensor_parallel,
    "pp": pipeline,
    "bubble": bubble,
    "overlap": overlap,
    "sequences": sequences,
    "bytes": held,
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--plot", metavar="PICTURE", type=Path, help="draw the orders of 4 stages to a file, and stop")
    args = parser.parse_args()
    if args.plot is not None:
        from _plot_orders import plot_orders

        plot_orders(args.plot)
        return
    rows = [row for name in args.only for row in PARTS[name]()]
    print(markdown(["figure", "median", "ratio or share (min-max)", "asked"], rows))


if __name__ == "__main__":
    main()
