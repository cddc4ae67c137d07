"""The remarks of localsgd and adaptive_localsgd (A.5)."""

from __future__ import annotations

import pytest

from fleet.options import DistributedStrategy
from fleet.strategies._shared.local_training import local_training_notes


@pytest.mark.parametrize("option", ["fp16_allreduce", "use_hierarchical_allreduce"])
def test_what_acts_on_gradients_has_nothing_to_act_on(option: str) -> None:
    """A.5: allowed together, and not silently."""
    strategy = DistributedStrategy()
    assert local_training_notes("localsgd", strategy, 2) == ()
    setattr(strategy, option, True)
    assert local_training_notes("localsgd", strategy, 2) == (
        f"{option} changes nothing while 'localsgd' is on: no gradient is exchanged.",
    )


def test_one_worker_has_nobody_to_average_with() -> None:
    """A.8: localsgd needs more than one worker."""
    notes = local_training_notes("adaptive_localsgd", DistributedStrategy(), 1)
    assert len(notes) == 1
    assert notes[0].startswith("adaptive_localsgd changes nothing with one worker")
