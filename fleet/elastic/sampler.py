"""ElasticSampler: deals samples to workers in an order that survives a restart with a different number of workers.

[Note: The order]
An epoch is one order of all samples, the same on every worker. ``done`` of them have been used; the rest is dealt
round-robin: worker ``r`` of ``n`` gets the positions ``done + r``, ``done + r + n``, and so on. After ``m`` samples
per worker the first ``done + m * n`` positions have been used, without a gap, so that any other number of workers can
deal the rest.

With a ``batch_size`` B whole batches are dealt, to ``v`` workers: round ``u`` after ``done`` gives worker ``r`` the
positions from ``done + (u v + r) B`` on. In a reproducible job these are the logical workers, whose number stays; each
process gets the batches of those that it hosts, round by round. The last round of an epoch, in which less than ``v B``
samples are left, begins the order again for the rest, or is dropped with ``drop_last``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import DataLoader, Sampler

from fleet.elastic.logical_loop import NumberedBatches, check_loader, numbered_loader, turns
from fleet.errors import CheckpointError, ConfigError
from fleet.job.running import running_job, running_logical
from fleet.training.batch_loops import BatchLoops

_FIELDS = frozenset(("epoch", "done", "seed", "shuffle", "num_samples"))


class ElasticSampler(Sampler[int]):
    """Gives each worker its share of the samples, and tracks which of them training has used.

    In a job that was never interrupted, the order is the same as with ``torch.utils.data.DistributedSampler``. Samples
    count when the training loop has used them, not when the loader's processes have prefetched them: iterate over
    ``sampler.batches(loader)``, or call :meth:`record` after each batch, and ``Checkpoint.save`` without ``every``.

    Args:
        dataset: anything with a length.
        shuffle: draw a new order in each epoch, from ``seed`` and the number of the epoch.
        seed: the same on every worker.
        drop_last: drop up to ``num_workers - 1`` samples at the end of an epoch (with ``batch_size`` up to
            ``num_workers * batch_size - 1``); by default that many are seen twice, so that every worker takes the same
            number of steps.
        num_workers: number of workers that train on different rows; ``fleet.data_replicas()`` by default.
        rank: which of them this worker is; ``fleet.data_rank()`` by default, so that the workers that hold one copy
            of the model together (mp, pp, sep, cp) get the same rows.
        batch_size: deal whole batches of this size, as ``strategy.reproducible`` needs it; the loader's own.

    Raises:
        ConfigError: ``dataset`` has no length, or rank and number of workers do not match.

    Example:
        >>> sampler = fleet.elastic.ElasticSampler(range(100), seed=1)
        >>> loader = torch.utils.data.DataLoader(range(100), batch_size=8, sampler=sampler)
        >>> for epoch in range(2):
        ...     sampler.set_epoch(epoch)
        ...     for batch in sampler.batches(loader):
        ...         pass
        >>> sampler.state_dict()["done"]
        100
    """

    says_next_batch = True  # to checkpoints, see BatchLoops

    def __init__(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
        num_workers: int | None = None, rank: int | None = None, batch_size: int | None = None,
    ) -> None:  # fmt: skip
        if not hasattr(dataset, "__len__"):
            raise ConfigError(f"ElasticSampler(dataset={dataset!r}) takes a data set with a length.")
        if (num_workers is None) != (rank is None):
            raise ConfigError("ElasticSampler() takes num_workers and rank together, or neither.")
        for name, switch in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(switch, bool):
                raise ConfigError(f"ElasticSampler({name}={switch!r}) takes True or False.")
        if not _is_whole(seed):
            raise ConfigError(f"ElasticSampler(seed={seed!r}) takes an integer from 0, the same on every worker.")
        self._is_placed = num_workers is not None
        self._logical = None if self._is_placed else running_logical()
        if num_workers is None or rank is None:
            num_workers, rank = _own_place()
        if not _is_whole(num_workers) or num_workers < 1:
            raise ConfigError(f"ElasticSampler(num_workers={num_workers!r}) takes an integer from 1.")
        if not _is_whole(rank) or rank >= num_workers:
            raise ConfigError(f"ElasticSampler(rank={rank!r}) takes a rank from 0 to {num_workers - 1}.")
        if batch_size is not None and (not _is_whole(batch_size) or batch_size < 1):
            raise ConfigError(
                f"ElasticSampler(batch_size={batch_size!r}) takes the number of samples of a batch, an integer from 1."
            )
        if self._logical is not None and batch_size is None:
            raise ConfigError(
                "ElasticSampler(data) deals samples, and with 'reproducible' logical workers get whole batches. Write "
                "ElasticSampler(data, batch_size=B) with the loader's batch size."
            )
        self.num_samples = len(dataset)
        self.num_workers = num_workers if self._logical is None else self._logical.num
        self.rank = rank
        self.batch_size = batch_size
        self._ranks = [rank] if self._logical is None else list(self._logical.ranks)
        self._dealt = batch_size or 1  # samples that a worker gets at once
        self._numbered: tuple[Any, DataLoader[Any]] | None = (
            None  # the loader of the last pass, and the one in its place
        )
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._again = 0  # times that the epoch was begun again, without set_epoch()
        self._start = 0  # positions used before this pass
        self._recorded = 0  # samples of this worker in this pass that training has used
        self._handed_out = 0  # samples of this pass that were handed out, including to the loader's processes
        self._is_resumed = False
        self._continues = False  # from a load to the first batch: an earlier run has started a loader here already

    @property
    def done(self) -> int:
        """How many samples of this epoch all workers have used in total."""
        # The last round may repeat samples, so that all workers get equally many.
        rounds = self._recorded // (self._dealt * len(self._ranks))
        return min(self._start + rounds * self._per_round, self.num_samples)

    @property
    def _per_round(self) -> int:
        """How many samples all workers get in one round."""
        return self._dealt * self.num_workers

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, unless it is the current one: then the rest of it comes next."""
        if not _is_whole(epoch):
            raise ConfigError(f"set_epoch({epoch!r}) takes the number of the epoch, from 0.")
        if epoch != self.epoch:
            self.epoch = epoch
            self._again = 0
            self._begin(0, resumed=False)

    def record(self, num_samples: int) -> None:
        """Records that training has used ``num_samples`` more samples of this worker; :meth:`batches` does so itself.

        Raises:
            ConfigError: ``num_samples`` is not a number from 0, or a ``Checkpoint(data=sampler)`` saves by ``every``.
        """
        if not _is_whole(num_samples):
            raise ConfigError(f"record({num_samples!r}) takes the number of samples of a batch, from 0.")
        job = running_job()
        for checkpoint in () if job is None else job.listeners.get(BatchLoops).checkpoints:
            if checkpoint.saves_by_itself(self):
                raise ConfigError(
                    f"sampler.record({num_samples}): Checkpoint(every={checkpoint.every}) saves where "
                    "sampler.batches(loader) is asked for its next batch, which counts the samples itself. Iterate "
                    "over sampler.batches(loader), or omit every and call checkpoint.save() after sampler.record()."
                )
        self._count(num_samples)

    def _count(self, num_samples: int) -> None:
        self._recorded = min(self._recorded + num_samples, self._share(self._start))

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterates over ``loader``, and counts a batch as used once the loop has it.

        Save after the step on a batch, not before it. When the launcher has asked the job to stop
        (``--preempt_grace``), the checkpoint is written where the loop asks for its next batch.

        Raises:
            ConfigError: the loader draws from another sampler, or builds its batches in a way that hides their size.
        """
        drawn_from: object = getattr(loader, "sampler", None)
        if drawn_from is not self:
            raise ConfigError("sampler.batches(loader) takes a DataLoader created with sampler=this sampler.")
        batch_size = loader.batch_size
        if batch_size is None:
            raise ConfigError(
                "sampler.batches(loader) takes a DataLoader with a batch_size. With a batch_sampler or without "
                "batches, iterate over the loader and call sampler.record(number of samples) after each batch."
            )
        if not getattr(loader, "in_order", True):
            raise ConfigError(
                "sampler.batches(loader) takes a DataLoader with in_order=True: otherwise it is unknown which samples "
                "a batch holds."
            )
        if self.batch_size is not None:
            check_loader(loader, self.batch_size)
        if not self._is_placed and running_logical() not in (None, self._logical):
            raise ConfigError(
                "sampler.batches(loader): the ElasticSampler was made before fleet.init() turned 'reproducible' on, "
                "and does not know its logical workers. Make it afterwards."
            )
        if self._logical is not None:
            self._logical.begin_loop()
            self._logical.order = crc32(repr((self.num_samples, self.seed, self.shuffle, self.epoch)).encode())
            if self._numbered is None or self._numbered[0] is not loader:
                self._numbered = (
                    loader,
                    numbered_loader(loader, NumberedBatches(self._begin_pass, batch_size, self._numbers)),
                )
            return self._counted(turns(self._logical, self, iter(self._numbered[1])), batch_size)
        # A loader draws a number from torch's generator when it starts; in a resumed epoch that has already happened,
        # and with persistent workers in the first epoch.
        has_drawn = self._continues if loader.persistent_workers else self._is_resumed and self.done
        state = torch.get_rng_state() if has_drawn else None
        self._continues = False
        iterator = iter(loader)
        if state is not None:
            torch.set_rng_state(state)
        return self._counted(iterator, batch_size)

    def _counted(self, iterator: Iterator[Any], batch_size: int) -> Iterator[Any]:
        job = running_job()

        def recorded() -> Iterator[Any]:
            # Before the yield: whatever the loop saves from here on comes after the step on this batch.
            for batch in iterator:
                self._count(batch_size)
                yield batch

        if job is None:
            yield from recorded()
            return
        yield from job.listeners.get(BatchLoops).over(self, recorded())

    def __iter__(self) -> Iterator[int]:
        """Iterates over this worker's share of the rest of the epoch; after its end, over the epoch again."""
        if self._logical is not None and running_logical() is self._logical:
            raise ConfigError(
                "The loader of an ElasticSampler was iterated by itself, and with 'reproducible' its batches belong to "
                "logical workers, some of which this process hosts. Train over sampler.batches(loader). For passes "
                "that are equal on all processes, as of update_bn(), make another DataLoader without this sampler."
            )
        return self._begin_pass()

    def _begin_pass(self) -> Iterator[int]:
        # Resumed at the end of an epoch, a run gets an empty pass, and not the epoch again.
        begins_anew = self.done >= self._end() and not self._is_resumed
        self._again += begins_anew
        self._begin(0 if begins_anew else self.done, resumed=False)
        return self._places(self._start)

    def __len__(self) -> int:
        """Returns how many samples this pass holds for each worker; in a reproducible job, for each logical worker.

        So ``len(loader)`` counts the updates of a pass (with gradient_merge its rounds) on any number of processes.
        """
        return self._rounds(self._start) * self._dealt

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the data: plain numbers, the same on every worker after the same step."""
        if self._handed_out and not self._recorded:
            raise ConfigError(
                f"ElasticSampler.state_dict(): {self._handed_out} samples were handed out and none were recorded as "
                "used. Iterate over sampler.batches(loader), or call sampler.record(number of samples) after each."
            )
        state = {
            "epoch": self.epoch,
            "done": self.done,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_samples": self.num_samples,
        }
        return state if self._logical is None else {**state, "again": self._again}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues at the position in ``state_dict``, with any number of workers.

        Raises CheckpointError when the order was different (another length, seed or shuffle), or ``state_dict`` is not
        a result of :meth:`state_dict`; nothing was changed.
        """
        if not isinstance(state_dict, Mapping) or not state_dict.keys() >= _FIELDS:
            raise CheckpointError(
                f"ElasticSampler.load_state_dict({f'{state_dict!r}'[:200]}) takes what state_dict() returned, with "
                f"{', '.join(sorted(_FIELDS))}."
            )
        for name in ("num_samples", "seed", "shuffle"):
            if state_dict[name] != getattr(self, name):
                raise CheckpointError(
                    f"ElasticSampler.load_state_dict(): the position was saved with {name} {state_dict[name]!r}, and "
                    f"this sampler has {getattr(self, name)!r}; the order of samples differs. Use the same data "
                    "and arguments, or begin a new epoch."
                )
        epoch = state_dict["epoch"]
        done = state_dict["done"]
        again = state_dict.get("again", 0)
        if not (_is_whole(epoch) and _is_whole(done) and _is_whole(again)) or done > self.num_samples:
            raise CheckpointError(
                f"ElasticSampler.load_state_dict(): epoch is {epoch!r} and done {done!r}; they take integers from "
                f"0, and done at most {self.num_samples}. Use another checkpoint, or begin a new epoch."
            )
        self.epoch = epoch
        self._again = again
        self._continues = bool(epoch or done)
        self._begin(done, resumed=True)

    def _begin(self, start: int, resumed: bool) -> None:
        self._start = start
        self._recorded = 0
        self._handed_out = 0
        self._is_resumed = resumed

    def _end(self) -> int:
        """Returns the end of the positions that are dealt from the current start without repeating any."""
        left = self.num_samples - self._start
        return self._start + (left // self._per_round * self._per_round if self.drop_last else left)

    def _share(self, start: int) -> int:
        return self._rounds(start) * self._dealt * len(self._ranks)

    def _rounds(self, start: int) -> int:
        left = max(self.num_samples - start, 0)
        return left // self._per_round if self.drop_last else -(-left // self._per_round)

    def _numbers(self) -> Iterator[tuple[int, ...]]:
        """Yields the number of each batch of this pass, see ``NumberedBatch``."""
        assert self._logical is not None
        seed = self._logical.seed  # of the whole pass, whose batches may be loaded ahead
        first = self._start // self._per_round
        for number in range(first, first + self._rounds(self._start)):
            for rank in self._ranks:
                yield seed, self.epoch, self._again, rank, number

    def _places(self, start: int) -> Iterator[int]:
        order = self._order()
        for first in range(start, start + self._rounds(start) * self._per_round, self._per_round):
            for rank in self._ranks:
                for place in range(first + rank * self._dealt, first + (rank + 1) * self._dealt):
                    self._handed_out += 1
                    # Past the end the order starts over, as in DistributedSampler.
                    yield order[place % self.num_samples]

    def _order(self) -> list[int]:
        if not self.shuffle:
            return list(range(self.num_samples))
        # The seed is that of DistributedSampler, so any number of workers draws the same order.
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order: list[int] = torch.randperm(self.num_samples, generator=generator, device="cpu").tolist()
        return order


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _own_place() -> tuple[int, int]:
    """Returns the number of data replicas and the data rank of this process; those of the job without fleet.init."""
    from fleet.parallel import get_rank, get_world_size

    job = running_job()
    if job is not None:
        return job.data_replicas, job.data_rank
    return get_world_size(), get_rank()
