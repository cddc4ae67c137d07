"""QueueDataset: streams its files once for each iteration."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from fleet.common.file_shard import split_files
from fleet.common.own_thread import OwnThread
from fleet.dataset.base import DatasetBase, read_samples
from fleet.dataset.batch import Batch, batch_of
from fleet.dataset.rows_of_batches import with_rows
from fleet.dataset.samples import Samples
from fleet.dataset.source import Source
from fleet.dataset.text import TextForm
from fleet.dataset.workers import batches_in_turns, check_same_files, whole_rounds
from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.running import running_logical

_BLOCKS_PER_THREAD = 2
_POLL_S = 0.1


class QueueDataset(DatasetBase):
    """Streams the files of this worker: each iteration reads them once, a few blocks ahead, and keeps nothing.

    With ``thread_num=1`` the samples come in file order. With more, several files are read at once and their samples
    come as they are ready. Iteration yields :class:`Batch`. With ``strategy.reproducible`` each logical worker streams
    its shard of the files with one thread, and the iteration ends where the first of them has no sample left.

    Example:
        >>> with open("part-0", "w") as file:
        ...     _ = file.write("2 7 9 1 1\\n1 4 1 0\\n")
        >>> dataset = fleet.QueueDataset()
        >>> dataset.init(batch_size=2, use_var=[fleet.dataset.Slot("words", lod_level=1), fleet.dataset.Slot("label")])
        >>> dataset.set_filelist(["part-0"])
        >>> [batch["label"].tolist() for batch in dataset]
        [[[1], [0]]]
    """

    def local_shuffle(self) -> NoReturn:
        """Raises NotImplementedError, as in Fleet: a stream cannot be shuffled."""
        raise NotImplementedError("QueueDataset does not hold its samples, so it cannot shuffle; use InMemoryDataset.")

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12) -> NoReturn:
        """Raises NotImplementedError, as in Fleet: a stream cannot be shuffled."""
        raise NotImplementedError("QueueDataset does not hold its samples, so it cannot shuffle; use InMemoryDataset.")

    def __iter__(self) -> Iterator[Batch]:
        logical = running_logical()
        if logical is None:
            yield from with_rows(self._batches(self.filelist))
        else:
            yield from batches_in_turns(self, logical, self._of_logical_workers(logical))

    def _of_logical_workers(self, logical: LogicalWorkers) -> Iterator[Batch]:
        """Yields the batches of the logical workers of this process in turn, as long as all in the job have one."""
        self._start_reading()
        if self._settings.thread_num > 1:
            raise ConfigError(
                f"QueueDataset.init(thread_num={self._settings.thread_num}) reads several files at once and gives "
                "their samples as they come, and with 'reproducible' batches must not depend on that. Set "
                "thread_num=1: each logical worker has a thread of its own."
            )
        check_same_files(self.filelist, "QueueDataset.set_filelist()")
        readers = [self._batches(split_files(self.filelist, rank, logical.num)) for rank in logical.ranks]
        try:
            for found in whole_rounds([partial(next, reader, None) for reader in readers], "QueueDataset"):
                yield from found
        finally:
            for reader in readers:
                reader.close()

    def _batches(self, files: Sequence[str]) -> Generator[Batch, None, None]:
        form, source = self._start_reading()
        size = self._settings.batch_size
        kept: list[Samples] = []
        for block in _stream(list(files), form, source, self._settings.thread_num):
            kept.append(block)
            if sum(map(len, kept)) < size:
                continue
            ready = Samples.joined(kept)
            whole = len(ready) // size * size
            for at in range(0, whole, size):
                yield batch_of(ready.part(at, at + size), form)
            kept = [ready.part(whole, len(ready))]
        if any(map(len, kept)):
            yield batch_of(Samples.joined(kept), form)


def _stream(files: list[str], form: TextForm, source: Source, num_threads: int) -> Iterator[Samples]:
    """Yields blocks of samples that threads prefetch; the threads end before the iteration does."""
    threads_wanted = min(num_threads, len(files))
    ready: queue.Queue[Samples | None] = queue.Queue(max(1, _BLOCKS_PER_THREAD * threads_wanted))
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)
    stop = threading.Event()

    # With a timeout: a loop that was left sets the event and takes nothing more from the queue.
    def put(item: Samples | None) -> None:
        while not stop.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=_POLL_S)
                break

    threads = [
        OwnThread(_read_all, waiting, form, source, stop, put, name="fleet-dataset", say=None, then=lambda: put(None))
        for _ in range(threads_wanted)
    ]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            item = ready.get()
            if item is not None:
                yield item
                continue
            running -= 1
            for thread in threads:
                if thread.failure is not None:
                    thread.result()  # raises it in the loop
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _read_all(
    waiting: queue.SimpleQueue[str],
    form: TextForm,
    source: Source,
    stop: threading.Event,
    put: Callable[[Samples | None], None],
) -> None:
    while not stop.is_set():
        try:
            file = waiting.get_nowait()
        except queue.Empty:
            break
        for block in read_samples(file, form, source, stop):
            put(block)
    put(None)
