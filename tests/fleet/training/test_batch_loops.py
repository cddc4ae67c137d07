"""Checkpoint(every=N): after a resume, the loop goes on with the batch after the last one that was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import fleet
from fleet.elastic import PREEMPTED
from tests.helpers.fleets import own_fleet

COUNT, SIZE = 24, 2


@pytest.fixture(autouse=True)
def _own_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)


class Loader:
    """Batches of numbers with a state, as torchdata's StatefulDataLoader has one: what the loop was given."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < COUNT:
            self.next += SIZE
            yield torch.arange(self.next - SIZE, self.next)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def loader(folder: Path) -> Any:
    return Loader()


def parquet(folder: Path) -> Any:
    if not (folder / "rows").exists():
        (folder / "rows").mkdir()
        pq.write_table(pa.table({"n": np.arange(COUNT)}), folder / "rows" / "0.parquet", row_group_size=5)
    return fleet.ParquetDataset(folder / "rows", columns=["n"], batch_size=SIZE)


def stream(folder: Path) -> Any:
    def events(partition: int, start: int) -> Iterator[tuple[int, int]]:
        return ((offset, offset) for offset in range(start, COUNT))

    return fleet.StreamDataset(events, int, batch_size=SIZE, name="events", partitions=1, timeout_s=5.0)


def start(folder: Path, make: Any, every: int) -> tuple[Any, Any, Any, Any]:
    fleet.init(is_collective=True, log_level="ERROR")
    net = torch.nn.Linear(1, 1)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.0))
    model = fleet.distributed_model(net)
    data = make(folder)
    checkpoint = fleet.elastic.Checkpoint(folder / "saves", model, optimizer, data=data, every=every)
    checkpoint.resume()
    return model, optimizer, data, checkpoint


def train(model: Any, optimizer: Any, data: Any, steps: int, merged: int = 1) -> list[int]:
    seen: list[int] = []
    for number, batch in enumerate(data):
        values = batch["n"] if isinstance(batch, dict) else batch
        seen += values.tolist()
        model(values[:, None].float()).mean().backward()
        if number % merged == merged - 1:
            optimizer.step()
            optimizer.zero_grad()
        if len(seen) == steps * merged * SIZE:
            return seen
    return seen


@pytest.mark.parametrize("make", [loader, parquet, stream])
@pytest.mark.parametrize(("every", "steps", "merged"), [(2, 5, 1), (2, 4, 1), (1, 3, 1), (2, 3, 2)])
def test_no_batch_is_left_out_or_trained_twice(make: Any, every: int, steps: int, merged: int, tmp_path: Path) -> None:
    """004-05: a process that dies after some steps; the next one goes on behind the last checkpoint."""
    model, optimizer, data, _ = start(tmp_path, make, every)
    first = train(model, optimizer, data, steps, merged)
    fleet.fleet.session.close()
    model, optimizer, data, checkpoint = start(tmp_path, make, every)
    trained = checkpoint.step * merged * SIZE
    # The last checkpoint is that of the last batch that was asked for after a step: the loop ended before another.
    assert checkpoint.step == (steps - 1) // every * every
    assert first[:trained] + train(model, optimizer, data, COUNT) == list(range(COUNT))


@pytest.mark.parametrize("make", [loader, parquet, stream])
def test_a_stop_on_request_loses_no_batch(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """004-05: the step after which the workers leave is the last one that the resumed loop does not repeat."""
    from fleet.elastic.health import Health

    monkeypatch.setenv("FLEET_PREEMPT_GRACE", "30")
    model, optimizer, data, _ = start(tmp_path, make, every=0)
    monkeypatch.setattr(Health, "is_preempted", property(lambda self: self._job.num_steps == 3))
    seen: list[int] = []

    def loop() -> None:
        for batch in data:
            values = batch["n"] if isinstance(batch, dict) else batch
            model(values[:, None].float()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.extend(values.tolist())

    with pytest.raises(SystemExit) as left:
        loop()
    assert left.value.code == PREEMPTED
    monkeypatch.undo()
    own_fleet(monkeypatch)
    model, optimizer, data, checkpoint = start(tmp_path, make, every=0)
    assert checkpoint.step == 3
    assert seen + train(model, optimizer, data, COUNT) == list(range(COUNT))


def test_the_loop_over_an_evaluation_set_saves_nothing(tmp_path: Path) -> None:
    """004-05: a run that resumed there would evaluate again, with other random numbers."""
    model, optimizer, data, checkpoint = start(tmp_path, parquet, every=1)
    other = fleet.ParquetDataset(tmp_path / "rows", columns=["n"], batch_size=SIZE)
    for number, batch in enumerate(data):
        model(batch["n"][:, None].float()).mean().backward()
        optimizer.step()
        before = len(list((tmp_path / "saves").glob("step-*"))) if (tmp_path / "saves").exists() else 0
        for held in other:
            model(held["n"][:, None].float())
        after = len(list((tmp_path / "saves").glob("step-*"))) if (tmp_path / "saves").exists() else 0
        assert after == before
        if number == 2:
            break
    assert checkpoint.step == 3


def step_on(model: Any, optimizer: Any, values: torch.Tensor) -> list[int]:
    model(values[:, None].float()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    found: list[int] = values.tolist()
    return found


@pytest.mark.parametrize("is_first", [True, False])
def test_a_loop_beside_one_of_fleets_keeps_the_batch_it_holds(is_first: bool, tmp_path: Path) -> None:
    """``zip`` takes the loader's batch before it asks the other loop, which is where the checkpoint is written."""

    def run(steps: int) -> tuple[list[int], Any]:
        model, optimizer, data, checkpoint = start(tmp_path, loader, every=2)
        other = parquet(tmp_path)
        seen: list[int] = []
        for pair in zip(data, other, strict=False) if is_first else zip(other, data, strict=False):
            seen += step_on(model, optimizer, pair[0 if is_first else 1])
            if len(seen) == steps * SIZE:
                break
        return seen, checkpoint

    first, _ = run(5)
    fleet.fleet.session.close()
    again, checkpoint = run(COUNT)
    assert checkpoint.step - len(again) // SIZE == 4
    assert first[: 4 * SIZE] + again == list(range(COUNT))


@pytest.mark.parametrize("make", [parquet, stream])
def test_loops_of_one_batch_are_saved_before_the_next_one(make: Any, tmp_path: Path) -> None:
    """``next(iter(data))`` ends each loop with its first batch, so it never asks for another."""
    model, optimizer, data, _ = start(tmp_path, make, every=2)

    def take() -> torch.Tensor:
        batch = next(iter(data))
        found: torch.Tensor = batch["n"] if isinstance(batch, dict) else batch
        return found

    first = [number for _ in range(5) for number in step_on(model, optimizer, take())]
    fleet.fleet.session.close()
    model, optimizer, data, checkpoint = start(tmp_path, make, every=2)
    assert checkpoint.step == 4
    assert first[: 4 * SIZE] + train(model, optimizer, data, COUNT) == list(range(COUNT))


def test_an_epoch_that_the_script_alone_counts_is_kept(tmp_path: Path) -> None:
    """Without ``set_epoch`` the data stays in epoch 0; a resumed run repeated the epochs before."""

    def run(steps: int) -> list[int]:
        model, optimizer, data, checkpoint = start(tmp_path, parquet, every=2)
        seen: list[int] = []
        for epoch in range(checkpoint.epoch, 2):
            for batch in data:
                seen += step_on(model, optimizer, batch["n"])
                if len(seen) == steps * SIZE:
                    return seen
            checkpoint.save(epoch=epoch + 1)
        return seen

    epoch = list(range(COUNT))
    first = run(COUNT // SIZE + 5)
    assert first == epoch + epoch[: 5 * SIZE]
    fleet.fleet.session.close()
    assert run(COUNT) == epoch[4 * SIZE :]
