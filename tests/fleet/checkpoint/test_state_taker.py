"""What describes a state has defaults that say nothing."""

from __future__ import annotations

import pytest

from fleet.checkpoint.index import Index
from fleet.checkpoint.items import StateSource, Wanted
from fleet.checkpoint.state_taker import Description, StateTaker


def test_a_taker_says_what_it_lacks() -> None:
    """No tensor has a twin unless a class says so; the rest every class must have."""
    taker, source = StateTaker(), StateSource(Index(), "nowhere")
    assert taker.twins(source) == []
    assert Description() == Description([], {}, {})
    for call in (taker.take, lambda: taker.check(source), lambda: taker.wanted(source)):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(NotImplementedError):
        taker.put(source, Wanted())
