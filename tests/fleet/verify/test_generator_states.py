"""States of the generators survive JSON, and say whether a data set draws from them."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from fleet.verify.generator_states import (
    GeneratorWatch,
    generator_states,
    kept_states,
    set_states,
    watch_reseeding,
)
from fleet.verify.loader_replay import ReplayedBatches, rows_of
from fleet.verify.record_files import RecordFile, read_record


def draws() -> list[float]:
    """Returns a draw of each generator, two where it keeps the second of a pair."""
    normal = [float(np.random.normal()), random.gauss(0, 1)]
    return [*normal, *torch.randn(3).tolist()]


def test_generators_go_on_from_their_states() -> None:
    np.random.seed(1)
    draws()  # numpy and random hold the second number of a pair now
    states = json.loads(json.dumps(generator_states()))
    assert states == generator_states()
    with kept_states():
        expected = draws()
        assert draws() != expected
    assert draws() == expected
    set_states(states)
    assert draws() == expected


def test_a_draw_inside_torch_moves_the_generator() -> None:
    watch = GeneratorWatch()
    assert not watch.has_moved()
    torch.dropout(torch.ones(4), 0.5, train=True)
    assert [watch.has_moved(), watch.has_moved()] == [True, False]
    torch.dropout(torch.ones(4), 0.5, train=True)
    watch.settle()
    assert not watch.has_moved()


def test_a_seed_from_the_system_after_one_that_was_given_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("manual_seed", "get_rng_state", "set_rng_state", "seed"):
        for module in (torch, torch.random):
            monkeypatch.setattr(module, name, getattr(torch.random, name))
    told: list[str] = []
    with kept_states():
        watch_reseeding(told.append)
        torch.seed()
        assert told == []
        torch.manual_seed(1)
        before = torch.get_rng_state()
        torch.seed()
        torch.set_rng_state(torch.get_rng_state())  # as where a library keeps the state for a while
        assert [bool(place) for place in told] == [True]
        torch.set_rng_state(before)
        assert told[1:] == [""]


class Shifted(Dataset[torch.Tensor]):
    """Samples with noise."""

    def __init__(self, noise: Callable[[], float]) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + self.noise()])


_SYSTEM = np.random.default_rng()


@pytest.mark.parametrize(
    ("noise", "other", "equal"),
    [
        (random.random, False, True),
        (lambda: float(torch.rand(())), False, True),
        (lambda: float(torch.rand(())), True, False),  # the worker began elsewhere: it may not be seeded
        (lambda: float(_SYSTEM.random()), False, False),
    ],
    ids=["random", "torch", "another state", "not seeded"],
)
def test_seeded_noise_is_known_by_the_states(
    tmp_path: Path, noise: Callable[[], float], other: bool, equal: bool
) -> None:
    loader = DataLoader(Shifted(noise), batch_size=4)
    parts: list[dict[str, Any]] = []
    with kept_states() as begun:
        for rank in range(2):
            states = generator_states()
            rows = rows_of([torch.stack([loader.dataset[i] for i in range(4)])])
            parts.append({"indices": [0, 1, 2, 3], "rows": rows, "states": json.loads(json.dumps(states))})
            torch.manual_seed(rank)
            random.seed(rank)
    if other:
        torch.rand(1)
    record = RecordFile(tmp_path)
    before = generator_states()
    ReplayedBatches(record, lambda entered: None)._compare_data(loader, "key", parts)
    record.close()
    assert read_record(tmp_path, "data") == [{"kind": "data", "key": "key", "equal": equal}]
    assert generator_states() == before
    assert other or before == begun
