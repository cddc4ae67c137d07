"""Faults happen where they were asked for and nowhere else."""

from __future__ import annotations

import pytest

from fleet.elastic.faults import Faults
from fleet.errors import ConfigError


def test_rank_step_and_count_decide() -> None:
    faults = Faults.read("step:raise:rank=1:step=3:count=2;save.begin:raise:generation=4", rank=1)
    faults.meet("step", 2)
    faults.meet("step", 3)
    with pytest.raises(OSError, match="No space left"):
        faults.meet("step", 3)
    faults.meet("step", 3)
    faults.meet("save.begin", 3)
    Faults.read("step:raise:rank=1").meet("step", 3)
    with pytest.raises(OSError, match="No space left"):
        Faults.read("save.begin:raise:generation=4", generation=4).meet("save.begin", 0)


def test_nothing_asked_for_means_nothing() -> None:
    Faults.read(None).meet("step", 1)
    assert Faults.read(" ; ").points == {}


@pytest.mark.parametrize("text", ["step", "nowhere:kill", "step:explode", "step:kill:rank=x", "step:kill:day=1"])
def test_wrong_texts_say_what_is_right(text: str) -> None:
    with pytest.raises(ConfigError, match="FLEET_FAULTS has"):
        Faults.read(text)
