"""Degrees of parallelism: the number of workers along each axis of the mesh, and the check of their product."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from fleet.errors import ConfigError
from fleet.job.axes import AXES


def plan_degrees(option: str, degrees: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Returns ``degrees`` by axis; a degree of -1, for 'dp' or 'sharding', takes the workers that the others leave.

    Args:
        option: the option that sets the degrees, for messages.
        degrees: number of workers along each axis.
        world_size: number of workers in the job.

    Raises:
        ConfigError: the product of the degrees is not ``world_size``.

    Example:
        >>> plan_degrees("hybrid_configs", {"dp": -1, "sharding": 2}, 8)
        {'dp': 4, 'sharding': 2}
    """
    free = next((axis for axis, degree in degrees.items() if degree == -1), None)
    total = prod(degree for axis, degree in degrees.items() if axis != free)
    if free is not None:
        if world_size % total:
            named = _product({axis: degree for axis, degree in degrees.items() if axis != free})
            raise ConfigError(
                f"{option}: {named} is {total}, which does not divide the {world_size} processes that were started; "
                f"{free}_degree takes what the other degrees leave. Change the degrees, or start a multiple of {total}."
            )
        return {**degrees, free: world_size // total}
    if total != world_size:
        others = total // degrees["dp"]
        sharding = total // degrees.get("sharding", 1)
        fits = f"Set dp_degree={world_size // others}" if world_size % others == 0 else "Change the degrees"
        if option == "sharding_configs" and world_size % sharding == 0:
            fits = f"Omit sharding_degree (it then takes all that the other degrees leave), {fits[0].lower()}{fits[1:]}"
        raise ConfigError(
            f"{option}: {_product(degrees)} is {total}, but {world_size} "
            f"{'process was' if world_size == 1 else 'processes were'} started. {fits}, or start {total}."
        )
    return dict(degrees)


def plan_experts(options: Any, planned: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the degrees of the mesh and those of the expert grid, ``{}`` for the second where no expert is divided.

    The workers of one pipeline stage are ``sharding * mp`` for the dense part of a model and ``moe_sharding * ep`` for
    its experts. With experts, cp divides the sharding axis, as in Fleet; without, it is a separate axis.

    Args:
        options: the options that ``planned`` comes from.
        planned: the degree of every axis.

    Raises:
        ConfigError: the two grids do not fit together.
    """
    hybrid = options["hybrid_configs"]
    ep = hybrid.ep_degree
    moe = hybrid.moe_sharding_degree
    rest = hybrid.cp_sharding_degree
    if ep == 1:
        for key, value in (("moe_sharding_degree", moe), ("cp_sharding_degree", rest)):
            if value > 1:
                raise ConfigError(
                    f"hybrid_configs[{key!r}] is {value} while ['ep_degree'] is 1: it lays out the workers of a job "
                    f"whose experts are divided. Set ep_degree, or leave {key} at 1."
                )
        return dict(planned), {}
    for axis in ("dp", "sep"):
        if planned[axis] > 1:
            raise ConfigError(
                f"hybrid_configs['ep_degree'] is {ep} and {axis}_degree is {planned[axis]}: the experts are divided "
                f"among the workers of the sharding and mp axes, so dp_degree and sep_degree must be 1. Set "
                f"sharding_degree={planned['sharding'] * planned[axis]} and {axis}_degree=1."
            )
    stage = planned["sharding"] * planned["mp"]
    dense = f"sharding_degree={planned['sharding']} * mp_degree={planned['mp']} is {stage}"
    cp = hybrid.cp_degree
    if moe * ep != stage:
        fits = f"Set moe_sharding_degree={stage // ep}" if stage % ep == 0 else f"Choose an ep_degree dividing {stage}"
        raise ConfigError(
            f"hybrid_configs: moe_sharding_degree={moe} * ep_degree={ep} is {moe * ep}, and {dense}; both count the "
            f"workers of one pipeline stage and must be equal. {fits}, or change sharding_degree."
        )
    if planned["sharding"] % cp or rest not in (1, planned["sharding"] // cp):
        raise ConfigError(
            f"hybrid_configs: cp_degree={cp} * cp_sharding_degree={rest} is {cp * rest}; with experts cp divides the "
            f"sharding axis, so the product must be sharding_degree={planned['sharding']}. Change one of them."
        )
    return {**planned, "sharding": planned["sharding"] // cp, "cp": cp}, {"moe_sharding": moe, "ep": ep}


def asked_degrees(options: Any) -> tuple[str, dict[str, int]]:
    """Returns the option that decides and the degrees it asks for; one of them may be -1."""
    hybrid = options["hybrid_configs"]
    config = options["sharding_configs"]
    degrees = {axis: getattr(hybrid, f"{axis}_degree") for axis in AXES}
    if hybrid.ep_degree > 1:
        degrees["cp"] = 1  # it divides the sharding axis: see plan_experts
    tensor_parallel = options["tensor_parallel_configs"].tensor_parallel_degree if options["tensor_parallel"] else 1
    degrees["mp"] = degrees["mp"] if degrees["mp"] > 1 else tensor_parallel
    if not options["sharding"]:
        return "hybrid_configs", degrees
    # sharding_configs leaves its degrees open and hybrid_configs names one, so the second decides.
    if config.sharding_degree == -1 and degrees["sharding"] > 1 and config.dp_degree == 1:
        return "hybrid_configs", degrees
    named = {axis: getattr(config, f"{axis}_degree") for axis in ("dp", "sharding", "mp", "pp")}
    named |= {axis: degrees[axis] for axis in ("mp", "pp") if named[axis] == 1}
    if named["sharding"] == -1:
        named["sharding"] = degrees["sharding"] if degrees["sharding"] > 1 else -1
        named["dp"] = degrees["dp"] if named["dp"] == 1 and degrees["dp"] != -1 else named["dp"]
    return "sharding_configs", degrees | named


def degrees_or_none(options: Any, world_size: int) -> dict[str, int] | None:
    """Returns the degree of every axis; ``None`` where they do not fit, which the plan refuses."""
    try:
        return plan_degrees(*asked_degrees(options), world_size)
    except ConfigError:
        return None


def _product(degrees: Mapping[str, int]) -> str:
    # The axes that divide nothing say nothing, except the first, which the next step may change.
    shown = [f"{axis}_degree={degree}" for axis, degree in degrees.items() if degree != 1 or axis == "dp"]
    return " * ".join(shown or [f"{axis}_degree={degree}" for axis, degree in degrees.items()])
