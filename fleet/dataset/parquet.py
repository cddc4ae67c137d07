"""ParquetDataset: batches of tensors from Parquet files, divided over workers by rows.

[Note: The order of an epoch]
An epoch has one order of all rows: row groups in an order made from the seed and the epoch, and in each group its rows
in an order made from the seed, the epoch and the group. What remains of it is a list of spans, which is the state.
Every worker reads one run of the remaining rows, so that it opens few row groups that another one reads too. Workers of
a collective job take equally many batches between checkpoints, so each of them knows which rows all have read. In a job
with parameter servers they do not, and each knows of itself only: its state names the worker and the rest of its share,
and only all states together name the remaining rows. In a reproducible job logical workers take the place of workers:
their runs are cut once an epoch, and the state says how many rows of them were read. Cut anew in the middle, where rows
repeat, the batches would follow from where the job was stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from fleet.dataset.dataset_settings import check_integers
from fleet.dataset.parquet_files import OFFSETS, ParquetFiles, found_files
from fleet.dataset.rows_of_batches import with_rows
from fleet.dataset.workers import batches_in_turns, data_place, listened_batches
from fleet.errors import CheckpointError, ConfigError
from fleet.features.column import FeatureColumn, of_one_width
from fleet.features.transforms import Transforms
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.running import running_logical, running_session

_RESTS = ("repeat", "drop", "uneven")
Span = tuple[int, int]  # places [start, stop) in the order of the epoch


def rows_of(spans: Sequence[Span]) -> int:
    """Returns how many rows the spans hold."""
    return sum(stop - start for start, stop in spans)


def _part(spans: Sequence[Span], start: int, stop: int) -> Iterator[Span]:
    """Yields the spans of rows ``start`` to ``stop``, counted over all of ``spans``."""
    before = 0
    for first, end in spans:
        low = max(start - before, 0)
        high = min(stop - before, end - first)
        if low < high:
            yield first + low, first + high
        before += end - first


@dataclass(frozen=True, slots=True)
class RowDivision:
    """The remaining rows of an epoch, cut into one run a worker.

    Attributes:
        spans: the remaining rows, in the order of the epoch.
        size: workers.
        rest: "uneven", "drop" or "repeat": the rule for rows that do not divide.
    """

    spans: tuple[Span, ...]
    size: int
    rest: str

    def bounds(self, rank: int) -> Span:
        """Returns the rows of a worker, counted over the remaining rows; with "repeat" they can pass the end."""
        each, over = divmod(rows_of(self.spans), self.size)
        if self.rest == "uneven":
            return rank * each + min(rank, over), (rank + 1) * each + min(rank + 1, over)
        each += self.rest == "repeat" and over > 0
        return rank * each, (rank + 1) * each

    def share(self, rank: int, rows: int = 0) -> list[Span]:
        """Returns the spans that a worker reads after ``rows`` rows; repeated rows are the first remaining ones."""
        start, stop = self.bounds(rank)
        start += rows
        total = rows_of(self.spans)
        spans: list[Span] = []
        # More than one lap where more workers than rows remain.
        while start < stop:
            lap = start // total * total
            spans += _part(self.spans, start - lap, min(stop - lap, total))
            start = min(stop, lap + total)
        return spans

    def after(self, rows: int, least: int) -> tuple[Span, ...]:
        """Returns the rows that remain when every worker has read ``rows``; none when no worker has ``least`` more."""
        bounds = [self.bounds(rank) for rank in range(self.size)]
        if all(stop - start - rows < least for start, stop in bounds):
            return ()
        return tuple(span for rank in range(self.size) for span in self.left(rank, rows))

    def left(self, rank: int, rows: int) -> list[Span]:
        """Returns the rest of a worker that has read ``rows`` rows; over all workers, each row once.

        The rows that "drop" leaves out are in the last worker's rest: another number of workers may divide them.
        """
        total = rows_of(self.spans)
        start, stop = self.bounds(rank)
        left = list(_part(self.spans, start + rows, min(stop, total)))
        return left + list(_part(self.spans, stop, total)) if rank == self.size - 1 else left


class ParquetDataset(IterableDataset[dict[str, Tensor]]):
    """Batches of the chosen columns: a dictionary of tensors, each worker its share of the rows.

    A column of numbers is a tensor [batch]. A list column (a bag of ids) is two: its flat values under its name and
    where each sample begins under ``NAME.offsets``, int64 [batch], as ``fleet.SparseEmbedding`` and
    ``nn.EmbeddingBag`` take them. Unsigned integers become int64; those from 2^63 up, as hashes are, keep their 64 bits
    and so their row. Every worker needs the same files.

    Any number of workers goes on where others stopped: give the dataset to ``fleet.elastic.Checkpoint(data=...)``. In
    collective jobs :meth:`state_dict` is the same on all workers that have taken as many batches; in a job with
    parameter servers each worker has its own, and :meth:`joined_states` makes one of all. With
    ``strategy.reproducible`` the rows are divided over the logical workers.

    Args:
        paths: a file, a glob, a folder (its ``*.parquet`` at any depth, but not below names that begin with ``_`` or
            ``.``, where other programs keep unfinished files), or a list of them, on local disks.
        columns: which; all if not given.
        batch_size: rows of a batch of this worker, or of a logical worker.
        shuffle_seed: shuffles row groups, and rows within a group, in another order for each :meth:`set_epoch`;
            ``None`` keeps the order.
        rest: the rule where rows do not divide by the workers: "repeat" gives every worker as many by repeating some
            rows (as torch's DistributedSampler), "drop" by leaving some out, "uneven" gives each row once and some
            workers one row more. If not given: "uneven" in a job with parameter servers and in one process, else
            "repeat". Logical workers take "repeat", which is theirs if not given, or "drop".
        drop_last: leaves out a worker's last batch if it is not full.
        fill: takes the place of nulls; without it they are refused.
        threads: that read row groups in advance; as many and one more are held in memory, and at least two for each
            logical worker.
        transforms: :class:`fleet.features.Transforms` that the rows go through in those threads. Its inputs need not
            be among the ``columns``; its outputs are in the batches. Text that it reads is not, and a text that is null
            is an empty word where ``fill`` is given.

    Raises:
        ConfigError: an argument is wrong, a column does not exist or is of a type without tensors, or pyarrow is not
            installed.
        FleetError: nulls in a column, and no ``fill``.

    Example:
        >>> import pyarrow, pyarrow.parquet
        >>> pyarrow.parquet.write_table(pyarrow.table({"words": [[7, 9], [7]], "label": [1, 0]}), "clicks.parquet")
        >>> dataset = fleet.ParquetDataset("clicks.parquet", columns=["words", "label"], batch_size=2)
        >>> [(batch["words"].tolist(), batch["words.offsets"].tolist()) for batch in dataset]
        [([7, 9, 7], [0, 2])]
    """

    says_next_batch = True  # to checkpoints, see BatchLoops

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        columns: Sequence[str] | None = None,
        batch_size: int,
        shuffle_seed: int | None = None,
        rest: str | None = None,
        drop_last: bool = False,
        fill: float | None = None,
        threads: int = 2,
        transforms: Transforms | None = None,
    ) -> None:
        seed = 0 if shuffle_seed is None else shuffle_seed
        check_integers("ParquetDataset", batch_size=(batch_size, 1), threads=(threads, 1), shuffle_seed=(seed, 0))
        if not isinstance(drop_last, bool):
            raise ConfigError(f"ParquetDataset(drop_last={drop_last!r}): it is True or False.")
        if rest is not None and rest not in _RESTS:
            raise ConfigError(f"ParquetDataset(rest={rest!r}): it is one of {', '.join(_RESTS)}, or None.")
        if isinstance(columns, str) or (columns is not None and (not columns or len(set(columns)) < len(columns))):
            raise ConfigError(f"ParquetDataset(columns={columns!r}): it is a list of names, each once, or None.")
        if transforms is not None and not isinstance(transforms, Transforms):
            raise ConfigError(f"ParquetDataset(transforms={transforms!r:.80}): it is a fleet.features.Transforms.")
        needed = () if transforms is None else transforms.inputs
        self._files = ParquetFiles(found_files(paths), columns, fill, needed)
        self._transforms = transforms
        self._columns = self._files.chosen if transforms is None else _names_after(self._files, transforms)
        self._batch_size = batch_size
        self._seed = shuffle_seed
        self._rest = rest
        self._drop_last = drop_last
        self._threads = threads
        self._sizes = [rows for _, _, rows in self._files.groups]
        self.epoch = 0
        self._remaining: tuple[Span, ...] = self._whole()
        self._division: RowDivision | None = None  # of the current iteration
        self._is_over = False  # the next iteration begins the epoch anew
        self._read = 0  # rows of each worker in the current iteration
        self._turn = 0  # iterations so far

    def _whole(self) -> tuple[Span, ...]:
        return ((0, sum(self._sizes)),) if sum(self._sizes) else ()

    # -- epochs and state ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, whose order follows from its number and the seed; the same number changes nothing.

        Raises:
            ConfigError: not an integer of at least 0.
        """
        check_integers("ParquetDataset", epoch=(epoch, 0))
        if epoch != self.epoch:
            self._remaining = self._whole()
            self.epoch = epoch
            self._division = None
            self._is_over = False

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and what remains of it after the batches that the loop was given."""
        left = [list(span) for span in self._left()]
        state = {"epoch": self.epoch, "seed": self._seed, "rows": list(self._sizes), "remaining": left}
        logical = running_logical()
        if logical is not None and self._division is not None:
            runs = [list(span) for span in self._division.spans]
            return {**state, "logical": {"workers": logical.num, "runs": runs, "read": self._read}}
        session = running_session()
        rank, size = data_place()
        if session is None or session.server_job is None or size == 1:
            return state
        division = self._division or RowDivision(self._remaining, size, self._rest or "uneven")
        own = division.left(rank, 0 if self._division is None else self._read)
        own = own if rows_of(own) >= self._least() else []
        return {**state, "worker": [rank, size], "own": [list(span) for span in own]}

    def _left(self) -> tuple[Span, ...]:
        return self._remaining if self._division is None else self._division.after(self._read, self._least())

    def _least(self) -> int:
        return self._batch_size if self._drop_last else 1

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was taken, on any number of workers.

        Raises:
            CheckpointError: the state is of other files, another seed, or another worker of a job with parameter
                servers.
        """
        if not isinstance(state, Mapping) or not {"epoch", "seed", "rows", "remaining"} <= set(state):
            got = f"the keys {sorted(map(str, state))}" if isinstance(state, Mapping) else type(state).__name__
            raise CheckpointError(f"ParquetDataset: a state of state_dict() is needed, got {got}.")
        if list(state["rows"]) != self._sizes or state["seed"] != self._seed:
            raise CheckpointError(
                f"ParquetDataset: the state is of {len(state['rows'])} row groups with {sum(state['rows'])} rows and "
                f"shuffle_seed={state['seed']}, this one has {len(self._sizes)} with {sum(self._sizes)} and "
                f"{self._seed}. Give the same files in the same order and the same seed."
            )
        place = data_place()
        if tuple(state.get("worker", place)) != place:
            raise CheckpointError(
                "ParquetDataset: the state is that of worker {} of {}, and this is worker {} of {}. Workers of a job "
                "with parameter servers take batches at their own pace: load the state of this worker, or what "
                "ParquetDataset.joined_states() makes of all states, which any number of workers can load. "
                "fleet.elastic.Checkpoint(data=...) does both.".format(*state["worker"], *place)
            )
        self.epoch = state["epoch"]
        self._division = None
        self._is_over = False
        self._remaining = tuple((start, stop) for start, stop in state["remaining"])
        logical = running_logical()
        begun = state.get("logical")
        if logical is not None and begun is not None and begun["workers"] == logical.num:
            runs = tuple((start, stop) for start, stop in begun["runs"])
            self._division = RowDivision(runs, logical.num, self._rest or "repeat")
            self._read = begun["read"]

    @staticmethod
    def joined_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the states of all workers of a job with parameter servers as one, for any number of workers.

        Raises:
            CheckpointError: a worker's state is missing, or they are of different epochs.
        """
        first = {name: value for name, value in states[0].items() if name not in ("worker", "own")}
        if len(states) == 1 or all(state == states[0] for state in states):
            return first
        places = sorted(tuple(state.get("worker", ())) for state in states)
        epochs = sorted({state["epoch"] for state in states})
        if places != [(rank, len(states)) for rank in range(len(states))] or len(epochs) > 1:
            raise CheckpointError(
                f"ParquetDataset.joined_states(): one state of each worker, all of one epoch, make one; these are of "
                f"workers (rank, number) {places} and epochs {epochs}. With as many workers as before, each can load "
                "its own."
            )
        own = [span for state in sorted(states, key=lambda state: state["worker"][0]) for span in state["own"]]
        return {**first, "remaining": own}

    # -- batches ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if get_worker_info() is not None:
            raise ConfigError("ParquetDataset reads in its own threads: use DataLoader(num_workers=0), or none.")
        logical = running_logical()
        if logical is None:
            yield from with_rows(listened_batches(self, self._batches(None)))
        else:
            yield from batches_in_turns(self, logical, self._batches(logical))

    def _batches(self, logical: LogicalWorkers | None) -> Iterator[dict[str, Tensor]]:
        """Yields the batches of this worker, or of its logical workers in turn."""
        division = self._divide(logical)
        self._turn += 1
        turn = self._turn
        ranks = [data_place()[0]] if logical is None else list(logical.ranks)
        shares = [division.share(rank, self._read) for rank in ranks]
        left = rows_of(shares[0])  # of each: several workers share evenly
        left -= left % self._batch_size if self._drop_last else 0
        pool = ThreadPoolExecutor(self._threads, "fleet-parquet")
        parts = [self._parts(share, pool, max((self._threads + 1) // len(ranks), 2)) for share in shares]
        held: list[deque[dict[str, Tensor]]] = [deque() for _ in ranks]
        try:
            while left:
                if turn != self._turn:
                    raise ConfigError("ParquetDataset: another loop over it has begun; this one cannot go on beside.")
                count = min(self._batch_size, left)
                left -= count
                for place in range(len(ranks)):
                    while sum(_rows(part, self._columns) for part in held[place]) < count:
                        held[place].append(next(parts[place]))
                    if place == len(ranks) - 1:
                        # A full batch also for the last one: the others of a collective job count theirs alike.
                        self._read += self._batch_size
                    yield _batch_from(held[place], count, self._columns)
        finally:
            pool.shutdown(cancel_futures=True)
        self._is_over = turn == self._turn

    def _divide(self, logical: LogicalWorkers | None) -> RowDivision:
        """Returns the division for a loop, which goes on where one was left; raises ConfigError."""
        if logical is not None and self._rest == "uneven":
            raise ConfigError(
                "ParquetDataset(rest='uneven') gives some workers more batches, and with 'reproducible' an update has "
                "one of each logical worker. Give rest='repeat' or rest='drop'."
            )
        size = data_place()[1] if logical is None else logical.num
        begun = self._division
        if logical is not None and begun is not None and begun.size == size and not self._is_over:
            return begun
        session = running_session()
        is_even = session is not None and session.server_job is None and size > 1
        self._remaining = self._whole() if self._is_over else self._left()
        self._is_over = False
        self._division = RowDivision(self._remaining, size, self._rest or ("repeat" if is_even else "uneven"))
        self._read = 0
        return self._division

    def _parts(self, spans: Sequence[Span], pool: ThreadPoolExecutor, ahead: int) -> Iterator[dict[str, Tensor]]:
        """Yields the rows of the spans, at most one row group at a time; ``pool`` reads some in advance."""
        epoch = self.epoch  # set_epoch() may begin the next one while this one is read
        pieces = iter(list(self._pieces(spans, epoch)))
        waiting: deque[Future[dict[str, Tensor]]] = deque()
        while True:
            while len(waiting) < ahead and (piece := next(pieces, None)) is not None:
                waiting.append(pool.submit(self._read_piece, *piece, epoch))
            if not waiting:
                return
            yield waiting.popleft().result()

    def _pieces(self, spans: Sequence[Span], epoch: int) -> Iterator[tuple[int, int, int]]:
        """Yields the row group of each piece of the spans, and which places in the order of the group."""
        order = np.arange(len(self._sizes))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        starts = np.concatenate([[0], np.cumsum(np.asarray(self._sizes, np.int64)[order])])
        for start, stop in spans:
            at = int(np.searchsorted(starts, start, "right")) - 1
            while at < len(order) and starts[at] < stop:
                low = max(start - int(starts[at]), 0)
                high = min(stop, int(starts[at + 1])) - int(starts[at])
                if low < high:
                    yield int(order[at]), low, high
                at += 1

    def _read_piece(self, group: int, low: int, high: int, epoch: int) -> dict[str, Tensor]:
        # The permutation of the whole group, whatever part is read: any number of workers cuts the same order.
        rows: np.ndarray[Any, Any] | slice = slice(low, high)
        if self._seed is not None:
            rows = np.random.default_rng([self._seed, epoch, group]).permutation(self._sizes[group])[low:high]
        found = self._files.read(group, rows)
        return found if self._transforms is None else _transformed(found, self._transforms, self._columns)


def _names_after(files: ParquetFiles, transforms: Transforms) -> list[str]:
    """Returns the columns of a batch; raises ConfigError where the files' columns do not fit the transforms."""
    stays = [name for name in files.chosen if files.kinds[name] != "text"]
    transforms.check({name: files.kinds[name] for name in transforms.inputs}, dict.fromkeys(stays))
    return list(dict.fromkeys([*stays, *transforms.outputs]))


def _transformed(found: Mapping[str, Any], transforms: Transforms, names: Sequence[str]) -> dict[str, Tensor]:
    columns = {}
    for name in transforms.inputs:
        values = found[name]
        ends = found.get(name + OFFSETS)
        numbers = of_one_width(values.numpy()) if isinstance(values, Tensor) else values
        columns[name] = FeatureColumn(numbers, None if ends is None else ends.numpy())
    outputs = transforms.apply(columns)
    batch: dict[str, Tensor] = {}
    for name in names:
        if name not in transforms.outputs:
            batch.update({one: found[one] for one in (name, name + OFFSETS) if one in found})
            continue
        batch[name] = torch.from_numpy(np.ascontiguousarray(outputs[name].values))
        ends = outputs[name].ends
        if ends is not None:
            batch[name + OFFSETS] = torch.from_numpy(ends)
    return batch


def _rows(part: Mapping[str, Tensor], columns: Sequence[str]) -> int:
    ends = part.get(columns[0] + OFFSETS)
    return len(part[columns[0]]) if ends is None else len(ends) - 1


def _batch_from(held: deque[dict[str, Tensor]], count: int, columns: Sequence[str]) -> dict[str, Tensor]:
    """Returns a batch of the first ``count`` rows of ``held`` and removes them there."""
    cut: list[dict[str, Tensor]] = []
    while count:
        part = held.popleft()
        rows = _rows(part, columns)
        cut.append(_sliced(part, 0, min(count, rows), columns))
        if rows > count:
            held.appendleft(_sliced(part, count, rows, columns))
        count -= min(count, rows)
    batch = {name: torch.cat([part[name] for part in cut]) for name in columns}
    for name in columns:
        if name + OFFSETS not in cut[0]:
            continue
        lengths = torch.cat([part[name + OFFSETS].diff() for part in cut])
        batch[name + OFFSETS] = lengths.cumsum(0) - lengths
    return batch


def _sliced(part: Mapping[str, Tensor], start: int, stop: int, columns: Sequence[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in columns:
        ends = part.get(name + OFFSETS)
        if ends is None:
            found[name] = part[name][start:stop]
        else:
            first = ends[0].item()
            found[name] = part[name][ends[start].item() - first : ends[stop].item() - first]
            found[name + OFFSETS] = ends[start : stop + 1]
    return found
