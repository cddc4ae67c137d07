"""trackers: where the values of a run are written; ``fleet.trackers`` holds them, this file their options."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import top_level


@dataclass(frozen=True, kw_only=True)
class TrackerConfig(Config, option="tracker_configs"):
    """The names of a run, and the values that are logged without a call."""

    project: str = setting("fleet", "name that runs are grouped by")
    run_name: str = setting(
        "", "name of the run; empty takes PADDLE_JOB_ID. A name that an earlier run has gets -2, -3, ... at its end"
    )
    folder: str = setting("runs", "folder of the trackers that write files")
    automatic: bool = setting(
        True, "log step times with their parts, rates and memory of worker 0 without a call of fleet.log"
    )
    every: int = setting(10, "steps between two of these records, which hold the means of the steps", at_least=1)
    total_steps: int = setting(
        0,
        "steps that the optimizers make in the whole run, for the progress on the page of the job and in the status of "
        "a Kubeflow TrainJob; 0: not known, and no progress is shown. fleet.log takes it as well",
        at_least=0,
    )
    peak_tflops: float = setting(
        0.0,
        "what this device computes at most, in TFLOP/s, for the model FLOPs utilisation; 0 takes the 16-bit peak of "
        "known GPUs, and logs no utilisation on others",
        at_least=0,
    )


@top_level
@dataclass(frozen=True, kw_only=True)
class TrackerSettings(Config):
    """The trackers of a run."""

    trackers: tuple[str, ...] = setting(
        [],
        "trackers that fleet.log writes to: csv, json, mlflow, tensorboard, trackio, wandb, and those that other "
        "packages declare",
    )
    tracker_configs: TrackerConfig = setting(TrackerConfig, "names of the run, and what is logged by itself")
