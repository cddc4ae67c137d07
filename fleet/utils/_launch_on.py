"""``python -m fleet launch-on slurm|ray``: the launchers of a job on the nodes that a scheduler gives."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from fleet.errors import ConfigError, did_you_mean

_PLACES = {"ray": "fleet.integrations._ray_command", "slurm": "fleet.launch.slurm.slurm_command"}
_USAGE = "usage: python -m fleet launch-on {ray,slurm} [options] [launcher's flags] script [arguments]"


def run(argv: Sequence[str]) -> int:
    """Runs the command of the place that ``argv`` names first; returns its exit status."""
    arguments = list(argv)
    if arguments and arguments[0] in ("-h", "--help"):
        helps = [f"python -m fleet launch-on {name} --help lists the options of {name}." for name in _PLACES]
        print("\n".join([_USAGE, "", *helps]))
        return 0
    if not arguments or arguments[0] not in _PLACES:
        named = repr(arguments[0]) if arguments else "nothing"
        hint = did_you_mean(arguments[0], _PLACES) if arguments else ""
        raise ConfigError(f"launch-on takes slurm or ray, got {named}.{hint}")
    status: int = import_module(_PLACES[arguments[0]]).run(arguments[1:])
    return status
