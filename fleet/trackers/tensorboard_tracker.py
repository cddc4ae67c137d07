"""TensorboardTracker: event files for TensorBoard; needs the extra ``tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from fleet.trackers.tracker import RunInfo, Tracker

_FLUSH_S = 10


class TensorboardTracker(Tracker):
    """Writes ``<folder>/<run>/``; ``tensorboard --logdir <folder>`` shows it."""

    def start(self, run: RunInfo) -> None:
        """Opens the folder; TensorBoard hides values of an earlier process for steps that are trained again."""
        self._writer = SummaryWriter(str(run.folder / run.name), purge_step=run.first_step, flush_secs=_FLUSH_S)
        if run.options and not run.resumed:
            text = "\n".join(f"    {name}: {value}" for name, value in run.options.items())
            self._writer.add_text("strategy", text)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Writes a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes pending values and closes the file."""
        self._writer.close()
