"""RayRequest: the arguments of ``fleet.integrations.ray.launch``, checked before anything starts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.env import VARIABLES
from fleet.errors import ConfigError, did_you_mean
from fleet.launch.cli.command_options import check_set_flags
from fleet.launch.cli.flags import FLAGS
from fleet.launch.cli.settings import parse_command_line

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SETS = "fleet.integrations.ray sets, from the nodes that Ray gives"
_RAY_PLACES = "the GPUs of a bundle are Ray's choice"
# Flags that this call sets besides those of the meeting, and their replacements.
_OWN_FLAGS = {
    "nproc_per_node": "Write nproc_per_node=N (--nproc_per_node=N before the launcher's flags).",
    "gpus": f"Write resources_per_node={{'GPU': N}} (--resource=GPU=N): {_RAY_PLACES}.",
    "devices": f"Write resources_per_node={{'GPU': N}} (--resource=GPU=N): {_RAY_PLACES}.",
}
_MEETING_TWINS = ("nnodes", "master", "rank", "ips", "host", "job_id", "standalone", "master_addr", "master_port",
                  "rdzv_backend", "nproc_per_node", "devices", "log_dir")  # fmt: skip
# Variables that the launchers get from this call alone, and the flag whose twin each is.
SET_VARIABLES = {
    **{name: "the launcher" for name, row in VARIABLES.items() if row.owner in ("launcher", "torch")},
    **{twin: f"--{name}" for name in _MEETING_TWINS for twin in FLAGS[name].env},
}
# The launcher's limits on its work after SIGTERM.
_ENDING_FLAGS = ("shutdown_timeout", "preempt_grace")


@dataclass(frozen=True, kw_only=True)
class RayRequest:
    """The arguments of ``launch``, checked; ``flags`` has no ``--log_dir``, which stands beside them."""

    script: str
    args: tuple[str, ...]
    nodes: int
    nproc_per_node: int | None
    resources: dict[str, float]
    placement_strategy: str
    flags: tuple[str, ...]
    log_dir: str
    ending_s: float  # limit of the launchers after SIGTERM
    env: dict[str, str]
    working_dir: str | None
    address: str | None
    timeout_s: float


def read_request(
    *, script: Any, args: Any, nodes: Any, nproc_per_node: Any, resources_per_node: Any, placement_strategy: Any,
    flags: Any, env: Any, working_dir: Any, address: Any, timeout_s: Any,
) -> RayRequest:  # fmt: skip
    """Returns the request; raises ConfigError for a wrong argument."""
    if not isinstance(script, str | os.PathLike) or not isinstance(os.fspath(script), str) or not os.fspath(script):
        raise ConfigError(f"script is {script!r}; it takes the path of the training script.")
    if placement_strategy not in _STRATEGIES:
        raise ConfigError(
            f"placement_strategy is {placement_strategy!r}; it takes one of {', '.join(_STRATEGIES)}."
            f"{did_you_mean(str(placement_strategy), _STRATEGIES)}"
        )
    _check_number(timeout_s, "timeout_s", "seconds, at least 0")
    if nproc_per_node is not None:
        _check_count(nproc_per_node, "nproc_per_node")
    _check_count(nodes, "nodes")
    given = {"script": os.fspath(script), "args": _texts(args, "args"), "nodes": nodes}
    own = _texts(flags, "flags")
    line = parse_command_line([*own, "--", given["script"], *given["args"]], "fleet.integrations.ray.launch")
    if line.script != given["script"] or line.script_args != given["args"]:
        raise ConfigError(f"flags is {list(own)!r}; it takes flags of the launcher alone, as in ['--max_restart=3'].")
    check_set_flags(line, nodes, sets=_SETS, chooses="Ray", number="nodes", more=_OWN_FLAGS)
    variables = _variables(env)
    copied = _optional_text(working_dir, "working_dir", "the path of a folder, or its URI")
    if copied is not None and "://" not in copied and not os.path.isdir(copied) and not os.path.isfile(copied):
        raise ConfigError(f"working_dir is {copied!r}, which does not exist (looked in {os.getcwd()}).")
    return RayRequest(
        **given,
        nproc_per_node=nproc_per_node,
        resources=_resources(resources_per_node, nproc_per_node or 1),
        placement_strategy=placement_strategy,
        flags=tuple(f"--{name}={text}" for name, text in line.flags.items() if name != "log_dir"),
        log_dir=line.flags.get("log_dir", ""),
        ending_s=sum(_ending_s(name, line.flags, variables) for name in _ENDING_FLAGS),
        env=variables,
        working_dir=copied,
        address=_optional_text(address, "address", "the address of a Ray cluster, as ray.init(address=...) does"),
        timeout_s=float(timeout_s),
    )


def _texts(values: Any, name: str) -> tuple[str, ...]:
    rule = "it takes a list of texts, as in ['--epochs=3', 'two words']"
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ConfigError(f"{name} is {values!r}; {rule}.")
    for value in values:
        if not isinstance(value, str):
            raise ConfigError(f"{name} holds {value!r}; {rule}. Write {str(value)!r}.")
        if "\0" in value:
            raise ConfigError(f"{name} holds {value!r}; no argument of a program holds a zero byte.")
    return tuple(values)


def _optional_text(value: Any, name: str, takes: str) -> str | None:
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{name} is {value!r}; it takes {takes}, or None.")
    return value


def _check_count(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; it takes a number from 1.")


def _check_number(value: Any, name: str, takes: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} is {value!r}; it takes {takes}.")


def _ending_s(name: str, flags: Mapping[str, str], env: Mapping[str, str]) -> float:
    texts = [flags.get(name), *(env.get(twin) for twin in FLAGS[name].env), FLAGS[name].default]
    text = next(f"{text}" for text in texts if text is not None)
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0  # the launcher refuses the value with the reason


def _resources(values: Any, workers: int) -> dict[str, float]:
    """Returns the resources of each bundle; Ray accepts no entry of 0, and no bundle without an entry."""
    if values is None:
        return {"CPU": float(workers)}
    if not isinstance(values, Mapping):
        raise ConfigError(f"resources_per_node is {values!r}; it takes a dictionary, as in {{'CPU': 8, 'GPU': 4}}.")
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"resources_per_node has the key {name!r}; it takes names of resources, as in 'CPU'.")
        if name.lower() in ("cpu", "gpu") and name not in ("CPU", "GPU"):
            raise ConfigError(f"resources_per_node has the key {name!r}. Did you mean {name.upper()!r}?")
        _check_number(value, f"resources_per_node[{name!r}]", "a number, at least 0")
    if values.get("GPU", 0) != int(values.get("GPU", 0)):
        raise ConfigError(f"resources_per_node['GPU'] is {values['GPU']!r}; a node of a job takes whole GPUs.")
    found = {name: float(value) for name, value in values.items() if value}
    if not found:
        raise ConfigError(f"resources_per_node is {dict(values)!r}; Ray places a launcher by at least one resource.")
    return found


def _variables(values: Any) -> dict[str, str]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"env is {values!r}; it takes a dictionary of variables, as in {{'NCCL_DEBUG': 'INFO'}}.")
    for name, value in values.items():
        if not isinstance(name, str) or not name or "=" in name or "\0" in name:
            raise ConfigError(f"env has the key {name!r}; it takes names of variables.")
        if not isinstance(value, str) or "\0" in value:
            raise ConfigError(f"env[{name!r}] is {value!r}; it takes a text. Write {str(value)!r}.")
        if name == "CUDA_VISIBLE_DEVICES" or name in SET_VARIABLES:
            reason = _RAY_PLACES if name == "CUDA_VISIBLE_DEVICES" else f"{SET_VARIABLES[name]} sets that"
            raise ConfigError(f"env has {name}, which this call does not take: {reason}. Omit it.")
    return dict(values)
