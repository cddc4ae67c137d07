"""WandbTracker: Weights & Biases; needs the extra ``wandb``. ``WANDB_MODE=offline`` keeps all on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from fleet.common.exit_status import EXIT
from fleet.trackers.tracker import RunInfo, Tracker


class WandbTracker(Tracker):
    """Writes a run of the project; its own settings (WANDB_MODE, WANDB_ENTITY, ...) hold."""

    def start(self, run: RunInfo) -> None:
        """Begins the run, or continues it."""
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=f"{run.project}-{run.name}".replace("/", "-"),
            dir=str(run.folder),
            config={"world_size": run.world_size, "strategy": dict(run.options)},
            resume="allow",
        )
        # W&B drops values whose own step is below an earlier one; a restarted run repeats steps, so they are a metric.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends the values."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish(exit_code=EXIT.code)
