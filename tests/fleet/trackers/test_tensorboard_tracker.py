"""TensorboardTracker: TensorBoard's own reader finds the values, once each after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.trackers.tracker import RunInfo


@pytest.mark.slow  # TensorBoard takes seconds to import
def test_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from fleet.trackers.tensorboard_tracker import TensorboardTracker

    for first, steps in ((None, range(8)), (5, range(5, 10))):
        tracker = TensorboardTracker()
        tracker.start(RunInfo(name="run", project="p", folder=tmp_path, resumed=first is not None, first_step=first))
        for step in steps:
            tracker.log({"loss": step / 2}, step)
        tracker.close()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, step / 2) for step in range(10)]
