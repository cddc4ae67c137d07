"""StepValues: the automatic values: step times with their parts, rates, memory, utilisation."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

    from fleet.job.wrapped_model import WrappedModel
    from fleet.profile.step_times import StepTimes

__all__ = ["StepValues", "peak_of"]

_READER = "trackers"
_PASSES = 3  # forward and backward; a backward pass has twice the operations of its forward
# Dense 16-bit TFLOP/s by a part of the device's name, the longest that fits; from the makers' data sheets.
_PEAKS = {
    "A10": 125.0,
    "A100": 312.0,
    "A10G": 70.0,
    "A30": 165.0,
    "A40": 149.7,
    "B200": 2250.0,
    "GH200": 989.0,
    "H100": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H20": 148.0,
    "H200": 989.0,
    "H800": 989.0,
    "L4": 121.0,
    "L40": 181.0,
    "L40S": 362.0,
    "T4": 65.0,
    "V100": 125.0,
}


class StepValues:
    """Adds up the time and work of this worker's steps, until :meth:`take`.

    Args:
        times: measures the parts of the steps.
        device: the device that trains.
        replicas: returns how many batches with different rows all workers train while this one trains one.
        peak_tflops: the device's peak; 0 where it is not known.
    """

    def __init__(
        self, times: StepTimes, device: torch.device, replicas: Callable[[], float], peak_tflops: float
    ) -> None:
        self._times = times
        self._device = device
        self._replicas = replicas
        self._peak = peak_tflops
        self._rows = self._forwards = 0
        self._models: set[int] = set()
        self._flops: dict[int, int] = {}  # of one forward, by rows
        self._counter: FlopCounterMode | None = None
        self._depth = 0
        self._work = 0
        self._has_all_work = True
        times.take(_READER)

    def forward_begins(self, model: WrappedModel, inputs: Any) -> None:
        """Called before each forward of a wrapped model with its arguments."""
        self._depth += 1
        if self._depth > 1 or not torch.is_grad_enabled() or not model.training:
            return
        if not self._models:
            self._times.take(_READER)  # the time before the first forward belongs to no step
        self._models.add(id(model))
        rows = next((leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()), 0)
        self._rows += rows
        self._forwards += 1
        if not self._peak or self._forwards == 1:  # the first forward may prepare things
            self._has_all_work = False
        elif rows in self._flops:
            self._work += self._flops[rows]
        # Counting slows a forward down, so each number of rows is counted once, and at most eight of them.
        elif not torch.compiler.is_compiling() and len(self._flops) < 8:
            from torch.utils.flop_counter import FlopCounterMode  # few jobs need it

            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()
            self._counted = rows
        else:
            self._has_all_work = False

    def forward_ends(self) -> None:
        """Called after it, also when it failed."""
        self._depth -= 1
        if self._counter is not None and self._depth == 0:
            counter = self._counter
            self._counter = None
            counter.__exit__(None, None, None)
            self._flops[self._counted] = counter.get_total_flops()
            self._work += self._flops[self._counted]

    def take(self, steps: int) -> dict[str, float]:
        """Returns the means of the last ``steps`` steps and resets the sums."""
        parts = self._times.take(_READER)
        total_s = sum(parts.values()) / 1e9
        if not steps or not total_s:
            return {}
        found = {f"time/{part}_ms": ns / 1e6 / steps for part, ns in parts.items()}
        found["time/step_ms"] = total_s * 1e3 / steps
        found["rate/steps_per_s"] = steps / total_s
        # With several models it is not known whose rows are the samples.
        if self._rows and len(self._models) == 1:
            found["rate/samples_per_s"] = self._rows * self._replicas() / total_s
        if self._peak and self._has_all_work and self._work:
            found["rate/mfu"] = _PASSES * self._work / total_s / (self._peak * 1e12)
        found.update(self._memory())
        self._rows = self._work = 0
        self._has_all_work = True
        return found

    def _memory(self) -> dict[str, float]:
        found = {"memory/host_mib": _resident_mib()}
        if self._device.type == "cuda":
            found["memory/device_peak_mib"] = torch.cuda.max_memory_allocated(self._device) / 2**20
        return found


def peak_of(device: torch.device) -> float:
    """Returns the dense 16-bit TFLOP/s of ``device``; 0 where they are not known."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    words = name.replace("-", " ").split()
    fitting = [each for each in _PEAKS if set(each.split()) <= set(words)]
    return _PEAKS[max(fitting, key=len)] if fitting else 0.0


def _resident_mib() -> float:
    """Returns the resident memory of this process; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
