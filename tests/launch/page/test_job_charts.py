"""Which values stand in which chart: one for a step, and the script's own before what is measured."""

from __future__ import annotations

import re

from fleet.launch.page.job_charts import PARTS, job_charts
from fleet.profile import step_times


def titles(names: list[str]) -> list[str]:
    charts = job_charts({name: [(1, 1.0), (2, 2.0)] for name in names})
    return [re.findall(r"<figcaption><span>([^<]*)</span>", chart)[0] for chart in charts if chart]


def test_the_parts_are_those_that_workers_measure() -> None:
    assert PARTS == step_times.PARTS


def test_one_chart_for_a_step_and_one_for_the_speed() -> None:
    measured = [*(f"time/{part}_ms" for part in (*PARTS, "step")), "rate/steps_per_s", "rate/samples_per_s"]
    assert titles([*measured, "memory/host_mib", "lr", "val/loss", "loss"]) == [
        "loss",
        "Where a step goes, worker 0, ms",
        "val/loss",
        "lr",
        "Speed of all workers, samples/s",
        "Memory of worker 0, MiB",
    ]


def test_steps_a_second_stand_in_for_samples() -> None:
    assert titles(["rate/steps_per_s"]) == ["Speed, steps/s"]
    assert titles(["time/step_ms"]) == ["time/step_ms"]
    assert titles([]) == []
