"""Loops of a reproducible job: one batch for each logical worker that this process hosts, update by update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from fleet.common.derived_seeds import derived_seed, seed_generators
from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers, LoopOverRanks
from fleet.job.running import running_job, running_logical
from fleet.training.batch_loops import BatchLoops

__all__ = ["logical_ranks"]


def logical_ranks() -> Iterator[int]:
    """Yields, for one round, the logical ranks of this process; the loop trains on a batch of each.

    Draws inside the loop are the logical worker's own: the same wherever it is hosted. Without
    ``strategy.reproducible`` there is one rank, :meth:`fleet.data_rank`.

    Raises:
        ConfigError: the loop before was left in the middle of an update.

    Example:
        >>> for update in range(2):
        ...     for rank in fleet.elastic.logical_ranks():
        ...         model(torch.ones(3, 4) * rank).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """
    job = running_job()
    if job is None or job.logical is None:
        yield 0 if job is None else job.data_rank
        return
    logical = job.logical
    loop = LoopOverRanks()
    logical.begin_loop()
    yield from job.listeners.get(BatchLoops).over(loop, (logical.begin_turn(loop) for _ in logical.ranks))


class NumberedBatch(list[int]):
    """The samples of one batch, and its number.

    The number has the job's seed, the epoch, how often it was begun again, the logical rank and the round in the epoch.
    """

    number: tuple[int, ...] = ()


class NumberedBatches:
    """A batch sampler that yields a :class:`NumberedBatch` of ``size`` samples after the other.

    Args:
        places: begins a pass, and returns the positions of its samples, batch after batch.
        size: samples in a batch.
        numbers: returns the numbers of the batches of a pass that has begun.
    """

    def __init__(
        self, places: Callable[[], Iterator[int]], size: int, numbers: Callable[[], Iterator[tuple[int, ...]]]
    ) -> None:
        self._places = places
        self._size = size
        self._numbers = numbers

    def __iter__(self) -> Iterator[NumberedBatch]:
        places = self._places()
        for number in self._numbers():
            batch = NumberedBatch(next(places) for _ in range(self._size))
            batch.number = number
            yield batch


class SeededDataset:
    """A data set whose samples are drawn with numbers that follow from their batch, in whatever process loads it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: NumberedBatch) -> list[Any]:
        parts: tuple[int | str, ...] = ("data", *batch.number)
        logical = running_logical() if get_worker_info() is None else None
        if logical is not None:
            logical.draw_from(*parts)
        else:
            seed_generators(derived_seed(*parts))
        several = getattr(self._dataset, "__getitems__", None)
        found: list[Any] = several(batch) if several is not None else [self._dataset[place] for place in batch]
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)


def numbered_loader(loader: DataLoader[Any], batches: NumberedBatches) -> DataLoader[Any]:
    """Returns a loader like ``loader`` that loads ``batches``, each with its seed."""
    made = copy.copy(loader)
    # DataLoader refuses assignments to these after it was made; iter() reads them.
    made.__dict__.update(dataset=SeededDataset(loader.dataset), batch_sampler=batches, _iterator=None)
    return made


def check_loader(loader: DataLoader[Any], batch_size: int) -> None:
    """Raises ConfigError unless ``loader`` has batches of ``batch_size``."""
    if loader.batch_size != batch_size:
        raise ConfigError(
            f"sampler.batches(loader): the sampler deals batches of {batch_size} (ElasticSampler(batch_size=...)), and "
            f"the loader's batch_size is {loader.batch_size}. Give both the same number."
        )


def turns(logical: LogicalWorkers, loop: object, batches: Iterable[Any]) -> Iterator[Any]:
    """Yields ``batches`` of ``loop``, each in the turn of its logical worker."""
    for batch in batches:
        logical.begin_turn(loop)
        yield batch
