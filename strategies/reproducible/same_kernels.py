"""The conditions of equal bits beside equal inputs: processor, versions, threads, deterministic kernels."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from fleet.env import Environment, export
from fleet.errors import OptionWarning

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def pin_kernels(num_threads: int, device: torch.device) -> None:
    """Pins the threads of torch, OpenMP and MKL, on a GPU also the deterministic kernels.

    torch passes the number on to OpenMP and MKL, and switches off MKL's own choice (MKL_DYNAMIC).
    """
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        # cuBLAS reads it when its first handle is made.
        if not Environment().has(_CUBLAS):
            export({_CUBLAS: ":4096:8"})
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)


def kernels_of(device: torch.device) -> dict[str, str]:
    """Returns what must stay equal for equal bits, by name."""
    found = {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": f"{torch.__version__}",
        "threads": f"{torch.get_num_threads()}",
        "device": device.type,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def differences(first: Mapping[str, Any], second: Mapping[str, Any], here: str = "then", there: str = "now") -> str:
    """Returns what differs, in words; an empty string where nothing does."""
    return "; ".join(
        f"{name} {first.get(name)!r} {here} and {second.get(name)!r} {there}"
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
    )


def warn_of_other_kernels(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warns where the bits may differ from those of the job that has saved."""
    if found := differences(saved, now):
        warnings.warn(
            f"'reproducible': the checkpoint was written with other kernels ({found}). The training goes on, and from "
            "here on differs from the undisturbed one by rounding.",
            OptionWarning,
            stacklevel=6,
        )
