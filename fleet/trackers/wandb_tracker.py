"""WandbTracker: Weights & Biases; needs the extra ``wandb``. ``WANDB_MODE=offline`` keeps all on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from fleet._exit_status import EXIT
from fleet.trackers.tracker import RunInfo, Tracker


class WandbTracker(Tracker):
    """Writes a run of the project; its own settings (WANDB_MODE, WANDB_ENTITY, ...) hold."""

    def start(self, run: RunInfo) -> None:
        """Begins the run, or goes on with it; values go under their own axis, because W&B takes no earlier step."""
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=f"{run.project}-{run.name}".replace("/", "-"),
            dir=str(run.folder),
            config={"world_size": run.world_size, "strategy": dict(run.options)},
            resume="allow",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends the values."""
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """Ends the run."""
        self._run.finish(exit_code=EXIT.code)
