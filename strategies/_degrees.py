"""Degrees of parallelism: how many workers stand along each axis of the mesh, and the check that they add up."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.errors import ConfigError

# Outermost axis first: neighbours along the last axis have neighbouring ranks.
AXES = ("dp", "pp", "sharding", "sep", "cp", "mp")


def plan_degrees(option: str, degrees: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Returns ``degrees`` by axis with ``dp = -1`` replaced by what the other degrees leave.

    Args:
        option: what the user types to set the degrees, for messages.
        degrees: number of workers along each axis.
        world_size: number of workers in the job.

    Raises:
        ConfigError: the product of the degrees is not ``world_size``.

    Example:
        >>> plan_degrees("hybrid_configs", {"dp": -1, "sharding": 2}, 8)
        {'dp': 4, 'sharding': 2}
    """
    others = 1
    for axis, degree in degrees.items():
        others *= 1 if axis == "dp" else degree
    if degrees["dp"] == -1:
        if world_size % others:
            named = _product({axis: degree for axis, degree in degrees.items() if axis != "dp"})
            raise ConfigError(
                f"{option}: {named} is {others}, which does not divide the {world_size} processes that were started. "
                f"Change the degrees, or start a multiple of {others}."
            )
        return {**degrees, "dp": world_size // others}
    total = others * degrees["dp"]
    if total != world_size:
        fits = f"Set dp_degree={world_size // others}" if world_size % others == 0 else "Change the degrees"
        raise ConfigError(
            f"{option}: {_product(degrees)} is {total}, but {world_size} "
            f"{'process was' if world_size == 1 else 'processes were'} started. {fits}, or start {total}."
        )
    return dict(degrees)


def _product(degrees: Mapping[str, int]) -> str:
    # The axes that divide nothing say nothing, except the first, which the next step may change.
    shown = [f"{axis}_degree={degree}" for axis, degree in degrees.items() if degree != 1 or axis == "dp"]
    return " * ".join(shown or [f"{axis}_degree={degree}" for axis, degree in degrees.items()])
