"""Random streams by name: they advance only when they are used, and go on where they were saved."""

from __future__ import annotations

import pytest
import torch

from fleet.errors import ConfigError
from fleet.strategies._shared.random_streams import RNGStatesTracker


def test_a_stream_is_that_of_its_seed_and_leaves_the_global_one_alone() -> None:
    """Surface section 4: rng_state(name) draws from the stream, which advances inside the context only."""
    tracker = RNGStatesTracker()
    tracker.add("a", 5)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    with tracker.rng_state("a"):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.rng_state("a"):
        second = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3))
    assert torch.equal(second, torch.rand(3))


def test_saved_states_go_on() -> None:
    tracker = RNGStatesTracker()
    tracker.add("a", 5)
    with tracker.rng_state("a"):
        torch.rand(3)
    saved = tracker.get_states_tracker()
    with tracker.rng_state("a"):
        expected = torch.rand(3)
    other = RNGStatesTracker()
    other.set_states_tracker(saved)
    with other.rng_state("a"):
        assert torch.equal(torch.rand(3), expected)
    with pytest.raises(ConfigError, match="not one that get_states_tracker"):
        other.set_states_tracker({"a": {"cpu": torch.zeros(1)}})


def test_an_error_inside_keeps_both_streams() -> None:
    tracker = RNGStatesTracker()
    tracker.add("a", 5)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="size"), tracker.rng_state("a"):
        torch.rand(2) @ torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_names_and_seeds_are_different() -> None:
    """Surface section 4: ValueError for a seed or a name that exists, and for a name that does not."""
    tracker = RNGStatesTracker()
    tracker.add("a", 5)
    with pytest.raises(ValueError, match="a stream of this name exists"):
        tracker.add("a", 6)
    with pytest.raises(ValueError, match="'a' has this seed"):
        tracker.add("b", 5)
    with pytest.raises(ConfigError, match="whole number"):
        tracker.add("b", 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"there are \['a'\]"), tracker.rng_state("b"):
        pass
    tracker.reset()
    assert tracker.names == []
