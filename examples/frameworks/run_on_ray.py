"""Runs examples/resnet/train_fleet_dygraph.py on two nodes of a Ray cluster; without a cluster, on this machine.

    python examples/frameworks/run_on_ray.py --nodes 2 -- --epochs 2

Ray counts every launcher's CPUs; what stands behind -- goes to the training script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray

from fleet.errors import LaunchError
from fleet.integrations.ray import launch

SCRIPT = Path(__file__).parents[1] / "resnet" / "train_fleet_dygraph.py"


def main() -> int:
    """Returns the exit code of the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="launchers, one for each bundle (default 2)")
    parser.add_argument("--workers", type=int, default=1, help="workers of each launcher (default 1)")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each launcher (default 0)")
    parser.add_argument(
        "--address", help="of a Ray cluster; default: the one on this machine, or a new one; local: a new one"
    )
    parser.add_argument("--script", default=str(SCRIPT), help="what the workers run")
    parser.add_argument("arguments", nargs="*", help="of the script")
    given = parser.parse_args()
    ray.init(address=given.address, log_to_driver=False)
    try:
        launch(
            given.script,
            args=given.arguments,
            nodes=given.nodes,
            nproc_per_node=given.workers,
            resources_per_node={"CPU": given.workers, "GPU": given.gpus},
            timeout_s=60,
        )
    except LaunchError as error:
        print(error)
        return error.exit_code
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
