"""``python -m fleet env``: one screen about this machine and this process, to paste into a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata

from fleet.common.addresses import hide_user
from fleet.common.command_text import plain_text, typed
from fleet.env import VARIABLES, Environment
from fleet.errors import FleetError
from fleet.launch.processes.redact import is_secret_name, redact

_PREFIXES = ("FLEET", "PADDLE_", "FLAGS_", "TORCH", "NCCL_", "GLOO_", "CUDA_")
_LONGEST = 80


def run(argv: Sequence[str]) -> int:
    """Prints the report and returns 0."""
    argparse.ArgumentParser(prog=typed("env"), description=plain_text(__doc__)).parse_args(list(argv))
    print(report(Environment()))
    return 0


def report(environment: Environment) -> str:
    """Returns the report: versions, machine, role, and the variables that matter, without secrets."""
    rows = [*_versions(), *_machine(), ("role", _role(environment))]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    variables = [f"  {name}={value}" for name, value in shown_variables(environment.inherited())]
    return "\n".join([*lines, "variables", *(variables or ["  none"])])


def shown_variables(values: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the variables of Fleet, torch and the schedulers, sorted; secrets and long values are shortened.

    Example:
        >>> shown_variables({"FLEET_JOB_SECRET": "abc", "RANK": "1", "HOME": "x"})
        [('FLEET_JOB_SECRET', '(set, not shown)'), ('RANK', '1')]
    """
    names = sorted(name for name in values if name in VARIABLES or name.startswith(_PREFIXES))
    return [(name, _shown(name, values[name])) for name in names if values[name].strip()]


def _shown(name: str, value: str) -> str:
    if is_secret_name(name):
        return "(set, not shown)"
    text = redact(hide_user(value)).replace("\n", "\\n")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _versions() -> Iterator[tuple[str, str]]:
    import fleet

    yield "fleet", fleet.__version__
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - the report must show a broken torch
        yield "torch", f"cannot be imported: {error}"
    else:
        built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
        built_for = f"ROCm {torch.version.hip}" if torch.version.hip else built_for
        yield "torch", f"{torch.__version__} (built for {built_for})"
    yield "numpy", _version_of("numpy")
    yield "python", f"{platform.python_version()} ({sys.executable})"


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.platform()}, {platform.machine()}"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "CPUs", f"{os.cpu_count()}, {usable} usable"
    yield "GPUs", _gpus()


def _gpus() -> str:
    try:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if names else ""
    except Exception as error:  # noqa: BLE001 - an incompatible driver is worth a line, not a crash
        return f"cannot be queried: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"{kinds} (NCCL {nccl})" if names else "none that torch can use"


def _role(environment: Environment) -> str:
    from fleet.role_maker import PaddleCloudRoleMaker

    maker = PaddleCloudRoleMaker(is_collective=False, environment=environment)
    try:
        record = maker.record
    except FleetError as error:
        return f"contradictory: {redact(f'{error}')}"
    return f"{record.kind.name.lower()} {record.global_rank} of {record.world_size}, started by {record.source}"
