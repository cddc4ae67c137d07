"""TrackioTracker: trackio, a tracker that keeps everything on this machine; needs the extra ``trackio``."""

from __future__ import annotations

from collections.abc import Mapping

import trackio

from fleet.trackers.tracker import RunInfo, Tracker


class TrackioTracker(Tracker):
    """Writes a run of the project to ``TRACKIO_DIR``; ``trackio show`` shows it."""

    def start(self, run: RunInfo) -> None:
        """Begins the run, or continues it."""
        config = {"world_size": run.world_size, "strategy": {name: f"{value}" for name, value in run.options.items()}}
        trackio.init(project=run.project, name=run.name, config=config, resume="allow", embed=False)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Sends the values."""
        trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Writes pending values and ends the run."""
        trackio.finish()  # type: ignore[no-untyped-call]
