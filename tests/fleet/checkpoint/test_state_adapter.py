"""What describes a state has defaults that say nothing."""

from __future__ import annotations

import pytest

from fleet.checkpoint.index import Index
from fleet.checkpoint.items import StateSource, Wanted
from fleet.checkpoint.state_adapter import Description, StateAdapter


def test_a_taker_says_what_it_lacks() -> None:
    """No tensor has a twin unless a class says so; the rest every class must have."""
    adapter, source = StateAdapter(), StateSource(Index(), "nowhere")
    assert adapter.twins(source) == []
    assert Description() == Description([], {}, {})
    for call in (adapter.describe, lambda: adapter.check(source), lambda: adapter.wanted(source)):
        with pytest.raises(NotImplementedError):
            call()
    with pytest.raises(NotImplementedError):
        adapter.put(source, Wanted())
