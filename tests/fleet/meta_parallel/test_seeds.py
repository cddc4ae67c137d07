"""model_parallel_random_seed in the running job."""

from __future__ import annotations

import pytest
import torch

from fleet.errors import ConfigError
from fleet.meta_parallel.seeds import model_parallel_random_seed
from fleet.strategies.tensor_parallel.streams import tracker


def test_without_a_seed_it_is_that_of_torch() -> None:
    """Surface section 4: the global stream has the seed, and the streams that were there are gone."""
    tracker.add("mine", 4)
    try:
        torch.manual_seed(31)
        model_parallel_random_seed()
        assert torch.initial_seed() == 31
        assert tracker.names == ["model_parallel_rng"]
        model_parallel_random_seed(8)
        assert torch.initial_seed() == 8
        with tracker.rng_state():
            drawn = torch.rand(2)
        torch.manual_seed(9)
        assert torch.equal(drawn, torch.rand(2))
    finally:
        tracker.reset()


def test_a_seed_is_a_whole_number() -> None:
    with pytest.raises(ConfigError, match="at least 0"):
        model_parallel_random_seed(-1)
