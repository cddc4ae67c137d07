"""Measures how near ``fleet.estimate_memory`` comes to the real peak of ResNet.

``docs/guides/estimate.md`` keeps the table.

Run from the repository root::

    python benchmarks/memory.py                     # ResNet-18 and 50, about ten minutes on two cores
    python benchmarks/memory.py --depth 18 --only plain amp
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import fleet

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "resnet")]
from _table import markdown  # noqa: E402
from model import ResNet  # noqa: E402

_MIB = 1024 * 1024
BLOCKS = {"recompute": True, "recompute_configs": {"checkpoints": ["layer?.?"]}}
# name -> workers, options, steps (two updates)
CASES: dict[str, tuple[int, dict[str, Any], int]] = {
    "plain": (1, {}, 2),
    "recompute": (1, BLOCKS, 2),
    "amp": (1, {"amp": True}, 2),
    "recompute and amp": (1, {"amp": True, **BLOCKS}, 2),
    "gradient_merge": (1, {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}, 4),
    "data_parallel": (2, {}, 2),
    "fp16_allreduce": (2, {"fp16_allreduce": True}, 2),
    "dgc": (2, {"dgc": True}, 2),
    "localsgd": (2, {"localsgd": True}, 2),
    "reproducible": (2, {"reproducible": True, "reproducible_configs": {"logical_workers": 4}}, 2),
    "sharding 1": (2, {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": 1}}, 2),
    "sharding 2": (2, {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": 2}}, 2),
    "sharding 3": (2, {"sharding": True, "sharding_configs": {"sharding_degree": 2, "stage": 3}}, 2),
}


def measured_bytes(
    name: str, depth: int, batch_size: int, size: int, optimizer: str = "momentum", timeout_s: float = 300.0
) -> int:
    """Returns the largest peak of the workers of a case."""
    workers, options, steps = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "fleet.launch", f"--nproc_per_node={workers}", f"--log_dir={folder}/log"]
        numbers = [str(depth), str(batch_size), str(size), optimizer, json.dumps(options), str(steps), folder]
        command = [*launch, str(HERE / "_memory_steps.py"), *numbers]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        results = [int(json.loads(path.read_text())) for path in Path(folder).glob("*.json")]
    if done.returncode or len(results) != workers:
        raise RuntimeError(f"{name}: the workers ended with {done.returncode}.\n{done.stdout}\n{done.stderr}")
    return max(results)


def estimated_bytes(name: str, depth: int, batch_size: int, size: int, optimizer: str = "momentum") -> int:
    """Returns the estimate of a case."""
    workers, options, _ = CASES[name]
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    estimate = fleet.estimate_memory(
        lambda: ResNet(depth),
        (batch_size, 3, size, size),
        strategy,
        world_size=workers,
        optimizer=optimizer,
        device=device,
    )
    return int(estimate.total_bytes)


def rows(names: Iterable[str], depths: Iterable[int], batch_size: int, size: int, optimizer: str) -> list[list[str]]:
    """Returns rows: case, estimate, measured peak, difference."""
    found = []
    for depth in depths:
        for name in names:
            estimate = estimated_bytes(name, depth, batch_size, size, optimizer)
            measured = measured_bytes(name, depth, batch_size, size, optimizer)
            cells = [f"ResNet-{depth}, {name}", f"{CASES[name][0]}", f"{estimate / _MIB:.0f}", f"{measured / _MIB:.0f}"]
            found.append([*cells, f"{estimate / measured - 1:+.1%}"])
            print(*found[-1], file=sys.stderr)
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, nargs="+", default=[18, 50])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=96, help="height and width of the images")
    parser.add_argument("--optimizer", choices=("momentum", "adam"), default="momentum")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    table = rows(args.only, args.depth, args.batch_size, args.size, args.optimizer)
    print(markdown(["job", "workers", "estimate, MiB", "measured peak, MiB", "difference"], table))


if __name__ == "__main__":
    main()
