"""job_charts: which values of a job stand in which chart."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.launch.page.chart import Chart, Points

PARTS = ("data", "forward", "backward", "exchange", "update", "other")
_STEP = "time/step_ms"
_SAMPLES, _STEPS = "rate/samples_per_s", "rate/steps_per_s"
# What worker 0 measures by itself, and how it is shown.
_MEASURED = {
    _SAMPLES: Chart(title="Speed of all workers", unit="samples/s", from_zero=True, cuts=True),
    _STEPS: Chart(title="Speed", unit="steps/s", from_zero=True, cuts=True),
    "rate/mfu": Chart(title="Share of the device's peak (MFU)", from_zero=True, cuts=True),
    "memory/host_mib": Chart(title="Memory of worker 0", unit="MiB", from_zero=True),
    "memory/device_peak_mib": Chart(title="Peak memory on the device, worker 0", unit="MiB", from_zero=True),
}


def job_charts(curves: Mapping[str, Points]) -> list[str]:
    """Returns the charts: values that the script logs, where a step goes, then rates and memory.

    Args:
        curves: the points of each value by name, none of them empty.
    """
    parts = [(part, curves[name]) for part in PARTS if (name := f"time/{part}_ms") in curves]
    whole_step = Chart(title="Where a step goes, worker 0", unit="ms", cuts=True).of_parts(parts) if parts else ""
    hidden = {f"time/{part}_ms" for part in PARTS} | {_STEP} if whole_step else set[str]()
    # Steps and samples per second draw the same line.
    hidden |= {_STEPS} if _SAMPLES in curves else set()
    own = sorted(curves.keys() - hidden - _MEASURED.keys(), key=lambda name: (not is_loss(name), "/" in name, name))
    drawn = [Chart(title=name).of_line(curves[name]) for name in own]
    drawn.insert(1, whole_step)
    return drawn + [chart.of_line(curves[name]) for name, chart in _MEASURED.items() if name in curves.keys() - hidden]


def is_loss(name: str) -> bool:
    """Returns whether a value is called a loss."""
    return "loss" in name.lower()
