"""named_exchange: profilers show it, and nothing else notices it."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from fleet.strategies._gradients.exchange_names import named_exchange


def test_a_profiler_shows_strategy_bucket_and_size() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with named_exchange("dgc", torch.zeros(1 << 18), "bucket 3"):
            pass
        with named_exchange("localsgd", torch.zeros(1)):
            pass
    found = {event.key for event in profile.key_averages()}
    assert found >= {"fleet: dgc bucket 3, 1 MiB", "fleet: localsgd, 3.81e-06 MiB"}


def test_without_a_profiler_there_is_nothing() -> None:
    assert isinstance(named_exchange("dgc", torch.zeros(1)), nullcontext)
