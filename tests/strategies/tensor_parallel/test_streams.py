"""Seeds of a job's streams, and dropout from a named one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fleet.errors import ConfigError
from fleet.job.axes import Axes
from fleet.strategies.tensor_parallel.streams import determinate_seed, dropout, seed_streams, tracker


@pytest.fixture(autouse=True)
def _no_streams() -> Iterator[None]:
    yield
    tracker.reset()


def drawn() -> torch.Tensor:
    with tracker.rng_state():
        return torch.rand(2)


@pytest.mark.parametrize("rank", range(8))
def test_the_seed_of_a_part(rank: int) -> None:
    """Surface section 4: 'model_parallel_rng' has seed + 1 + mp_rank * pp + stage, the global stream the seed."""
    axes = Axes({"dp": 2, "pp": 2, "mp": 2}, rank)
    stage, part = rank // 2 % 2, rank % 2
    assert seed_streams(100, axes) == 100
    assert torch.initial_seed() == 100
    found = drawn()
    torch.manual_seed(100 + 1 + part * 2 + stage)
    assert torch.equal(found, torch.rand(2))


def test_dropout_from_a_stream() -> None:
    """Surface section 4: fleet.layers.mpu.random.dropout."""
    tracker.add("a", 3)
    x = torch.ones(4, 6)
    before = torch.get_rng_state()
    first = dropout(x, 0.5, rng_name="a")
    assert torch.equal(torch.get_rng_state(), before)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(first, dropout(x, 0.5, rng_name="a"))
    whole_rows = dropout(x, 0.5, axis=0)
    assert torch.equal(whole_rows, whole_rows[:, :1].expand_as(x))
    assert torch.equal(dropout(x, 0.5, training=False), x)
    assert torch.equal(dropout(x, 0.5, training=False, mode="downscale_in_infer"), x / 2)
    assert set(dropout(x, 0.5, mode="downscale_in_infer").unique().tolist()) == {0.0, 1.0}
    assert determinate_seed("a") != determinate_seed("a")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [({"p": 1.5}, "from 0 to 1"), ({"mode": "up"}, "one of upscale"), ({"axis": 0, "rng_name": "a"}, "axis=None")],
)
def test_dropout_refuses(arguments: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        dropout(torch.ones(2), **arguments)
