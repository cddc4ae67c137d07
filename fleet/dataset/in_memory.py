"""InMemoryDataset: holds the samples of its files, shuffles them here or over all workers, yields batches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

import numpy as np

from fleet.common.file_shard import split_files
from fleet.common.log import LOGGER
from fleet.dataset.base import DatasetBase, read_samples
from fleet.dataset.batch import Batch, batch_of
from fleet.dataset.dataset_settings import MEMORY_OPTIONS, DatasetSettings
from fleet.dataset.rows_of_batches import with_rows
from fleet.dataset.samples import Ints, Samples, empty_samples
from fleet.dataset.shuffle import choose_workers, exchange_samples, merge_by_id, random_places, replaced_places
from fleet.dataset.source import Source
from fleet.dataset.text import TextForm
from fleet.dataset.workers import (
    OneWorker,
    WorkerGroup,
    batches_in_turns,
    check_same_files,
    same_draws,
    sum_over,
    whole_rounds,
    worker_group_of,
)
from fleet.errors import ConfigError, NotInitializedError, UnsupportedOptionError
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.running import running_logical

_FORM_OPTIONS = ("use_var", "parse_ins_id", "parse_content", "input_type")


class InMemoryDataset(DatasetBase):
    """Holds the samples of this worker's files in memory; each iteration yields all of them as :class:`Batch`.

    With ``strategy.reproducible`` it holds those of the logical workers that this process hosts, each its shard of the
    files, and an iteration ends where the first logical worker has no sample left.

    Example:
        >>> with open("part-0", "w") as file:
        ...     _ = file.write("2 7 9 1 1\\n1 4 1 0\\n")
        >>> dataset = fleet.InMemoryDataset()
        >>> dataset.init(batch_size=2, use_var=[fleet.dataset.Slot("words", lod_level=1), fleet.dataset.Slot("label")])
        >>> dataset.set_filelist(["part-0"])
        >>> dataset.load_into_memory()
        >>> for batch in dataset:
        ...     print(batch["words"], batch["label"].tolist())
        (tensor([7, 9, 4]), tensor([0, 2, 3])) [[1], [0]]
        >>> dataset.global_shuffle(fleet)
        >>> dataset.get_shuffle_data_size(fleet)
        2
    """

    _feed = "MultiSlotInMemoryDataFeed"
    _options = MEMORY_OPTIONS

    def __init__(self) -> None:
        super().__init__()
        self._samples: Samples | None = None
        self._form: TextForm | None = None
        self._order: Ints = np.empty(0, np.int64)
        self._sizes = [0]  # samples of each logical worker of this process; without any, of the process
        self._is_for: tuple[int, range] | None = None  # the logical workers, and those of this process
        self._replaced: dict[int, Ints] = {}
        self._num_shuffled = 0
        self._preload: Future[list[Samples]] | None = None

    def init(self, **options: Any) -> None:
        """Sets the options; omitted ones keep their defaults.

        Args:
            options: those of :meth:`DatasetBase.init`, and by name:

                - ``parse_ins_id`` (False), ``parse_content`` (False): a line begins with ``1 ID``, then ``1 CONTENT``;
                  both are in :class:`Batch`.
                - ``merge_size`` (-1): above 0, :meth:`global_shuffle` merges that many samples with the same id into
                  one and drops groups of any other size.
                - ``fleet_send_batch_size`` (1024): samples in one message of :meth:`global_shuffle`.
                - ``fleet_send_sleep_seconds`` (0): pause after each round of messages.
                - ``fea_eval`` (False), ``candidate_size`` (10000): allow :meth:`slots_shuffle`, and set how many
                  samples it draws values from.
                - ``queue_num`` (-1): no effect here, with a warning.

        Raises:
            ConfigError: an unknown option or a wrong value; nothing was changed.
        """
        super().init(**options)

    def update_settings(self, **options: Any) -> None:
        """Changes some options of :meth:`init`; the others keep their values.

        The form of a line (``use_var``, ``parse_ins_id``, ``parse_content``, ``input_type``) cannot change while
        samples are in memory.

        Raises:
            ConfigError: an unknown option or a wrong value; nothing was changed.
        """
        self._change("update_settings", **options)

    def _change(self, call: str, **options: Any) -> None:
        changed = self._settings.changed(options, self._options, f"{type(self).__name__}.{call}")
        # The samples in memory were parsed by the old form; batches would read their columns by the new one.
        fixed = [name for name in _FORM_OPTIONS if getattr(changed, name) != getattr(self._settings, name)]
        if fixed and (self._samples is not None or self._preload is not None):
            raise ConfigError(f"{call}({fixed[0]}=...) while samples are in memory; call release_memory() first.")
        self._settings: DatasetSettings = changed

    def _init_distributed_settings(self, **options: Any) -> None:
        """Sets options that a later :meth:`init` does not change; with ``merge_size`` it also reads ids."""
        if isinstance(options.get("merge_size"), int) and options["merge_size"] > 0:
            options = {"parse_ins_id": True, **options}
        self._set("_init_distributed_settings", **options)

    def set_parse_ins_id(self, parse_ins_id: bool) -> None:
        """Sets ``parse_ins_id`` of :meth:`init`."""
        self._set("set_parse_ins_id", parse_ins_id=parse_ins_id)

    def set_parse_content(self, parse_content: bool) -> None:
        """Sets ``parse_content`` of :meth:`init`."""
        self._set("set_parse_content", parse_content=parse_content)

    def set_merge_by_lineid(self, merge_size: int = 2) -> None:
        """Sets ``merge_size`` of :meth:`init`, and ``parse_ins_id``."""
        self._set("set_merge_by_lineid", merge_size=merge_size, parse_ins_id=True)

    def set_fleet_send_batch_size(self, fleet_send_batch_size: int = 1024) -> None:
        """Sets ``fleet_send_batch_size`` of :meth:`init`."""
        self._set("set_fleet_send_batch_size", fleet_send_batch_size=fleet_send_batch_size)

    def set_fleet_send_sleep_seconds(self, fleet_send_sleep_seconds: float = 0) -> None:
        """Sets ``fleet_send_sleep_seconds`` of :meth:`init`."""
        self._set("set_fleet_send_sleep_seconds", fleet_send_sleep_seconds=fleet_send_sleep_seconds)

    def set_fea_eval(self, record_candidate_size: int, fea_eval: bool = True) -> None:
        """Sets ``candidate_size`` and ``fea_eval`` of :meth:`init`."""
        self._set("set_fea_eval", candidate_size=record_candidate_size, fea_eval=fea_eval)

    def set_queue_num(self, queue_num: int) -> None:
        """Warns: ``queue_num`` has no effect here."""
        self._change("set_queue_num", queue_num=queue_num)

    _set_parse_ins_id = set_parse_ins_id
    _set_parse_content = set_parse_content
    _set_queue_num = set_queue_num
    _set_merge_by_lineid = set_merge_by_lineid
    _set_fea_eval = set_fea_eval
    _set_fleet_send_batch_size = set_fleet_send_batch_size
    _set_fleet_send_sleep_seconds = set_fleet_send_sleep_seconds

    # ---- memory --------------------------------------------------------------------------------------------------

    def load_into_memory(self, is_shuffle: bool = False) -> None:
        """Reads all files with ``thread_num`` threads, in order, and replaces the samples in memory.

        Args:
            is_shuffle: call :meth:`local_shuffle` afterwards.

        Raises:
            ConfigError: no slots, an absent file, a malformed line, a program that failed; the memory is unchanged.
        """
        form, source = self._start_reading()
        self._keep(_load_shares(self._shares(), form, source, self._settings.thread_num), form)
        if is_shuffle:
            self.local_shuffle()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Starts reading all files in the background; :meth:`wait_preload_done` moves the samples into memory.

        Until then iteration yields the samples that were loaded before.

        Args:
            thread_num: threads for this load; ``None``: ``thread_num`` of :meth:`init`.
        """
        if self._preload is not None:
            raise ConfigError("preload_into_memory() is already running; call wait_preload_done() first.")
        threads = self._settings.thread_num if thread_num is None else thread_num
        if type(threads) is not int or threads < 1:
            raise ConfigError(f"preload_into_memory(thread_num={thread_num!r}) takes an integer of at least 1.")
        form, source = self._start_reading()
        pool = ThreadPoolExecutor(1, "fleet-preload")
        self._preload = pool.submit(_load_shares, self._shares(), form, source, threads)
        pool.shutdown(wait=False)

    def wait_preload_done(self) -> None:
        """Waits until the samples of :meth:`preload_into_memory` are in memory; raises the error of their reading."""
        if self._preload is None:
            raise NotInitializedError("wait_preload_done() needs preload_into_memory() first.")
        preload = self._preload
        self._preload = None
        self._keep(preload.result(), self._settings.form)

    def release_memory(self) -> None:
        """Releases all samples; the options and the list of files stay."""
        if self._preload is not None:
            self._preload.exception()  # waits: its threads would fill memory that is to be free
            self._preload = None
        self._keep([Samples(())], None)
        self._samples = None

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Returns the number of samples in memory on this worker or, with ``fleet``, on all workers."""
        return self._total(len(self._order), fleet, "get_memory_data_size")

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Returns the number of samples that the last shuffle left in memory, or 0; with ``fleet``, on all workers."""
        return self._total(self._num_shuffled, fleet, "get_shuffle_data_size")

    # ---- order ---------------------------------------------------------------------------------------------------

    def local_shuffle(self) -> None:
        """Shuffles the samples of this worker; ``torch.manual_seed`` fixes the order.

        With ``strategy.reproducible`` those of each logical worker get an order that follows from the job's seed, the
        rounds trained so far and its rank, and not from earlier shuffles.
        """
        self._need_samples("local_shuffle")
        # Only the order is shuffled: samples stay in their columns, see [Note: Columns].
        logical = running_logical()
        if logical is None:
            self._order = self._order[random_places(len(self._order))]
        else:
            self._check_dealt(logical)
            starts = np.cumsum([0, *self._sizes])
            parts = []
            for place, rank in enumerate(logical.ranks):
                random = np.random.default_rng(logical.seed_of("shuffle", logical.round, rank))
                parts.append(starts[place] + random.permutation(self._sizes[place]))
            self._order = np.concatenate(parts)
        self._num_shuffled = len(self._order)

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12) -> None:
        """Sends every sample to a random worker and shuffles what arrives; every worker must call it.

        Each worker then holds about as many samples as the others, and together they hold the same samples as before.
        With ``merge_size``, equal ids go to the same worker and are merged. A :meth:`slots_shuffle` is undone. While it
        runs, a worker holds its samples twice. Workers that hold one copy of the model together (mp, pp, sep, cp) get
        the same samples in the same order; give them the same files (``fleet.util.get_file_shard``).

        Args:
            fleet: ``fleet`` after ``fleet.init()``, or a :class:`WorkerGroup`; ``None``: only this worker's samples.
            thread_num: threads that pack and unpack the messages.

        Raises:
            ConfigError: the workers have different slots; raised before anything is sent.
            UnsupportedOptionError: the workers of this job have no process group.
        """
        if type(thread_num) is not int or thread_num < 1:
            raise ConfigError(f"global_shuffle(thread_num={thread_num!r}) takes an integer of at least 1.")
        _refuse_logical("global_shuffle", "sends samples to random processes")
        samples, form = self._need_samples("global_shuffle")
        group = OneWorker() if fleet is None else worker_group_of(fleet, "global_shuffle")
        group.barrier()
        with same_draws(group):
            self._shuffle_globally(group, samples, form, thread_num)

    def _shuffle_globally(self, group: WorkerGroup, samples: Samples, form: TextForm, thread_num: int) -> None:
        settings = self._settings
        # Shuffled before they are sent: messages are cut by place, and files often hold their samples in some order.
        samples = samples.gather(self._order[random_places(len(self._order))])
        if group.size > 1:
            ids = samples.columns[0] if settings.merge_size > 0 else None
            samples = exchange_samples(
                samples,
                choose_workers(len(samples), group.size, ids),
                form,
                group,
                send_batch_size=settings.fleet_send_batch_size,
                sleep_s=settings.fleet_send_sleep_seconds,
                num_threads=thread_num,
            )
        if settings.merge_size > 0:
            samples, dropped = merge_by_id(samples, form, settings.merge_size)
            if dropped:
                LOGGER.warning("merge_size=%d: %d samples were dropped", settings.merge_size, dropped)
        self._keep([samples], form)
        self.local_shuffle()

    def slots_shuffle(self, slots: Sequence[str]) -> None:
        """Gives every sample the values of another random sample in these slots; the other slots keep theirs.

        It shows how much a model relies on a slot. A slot named by an earlier call but not by this one gets its own
        values back; an empty list restores all. With at most ``candidate_size`` samples the values are permuted; with
        more, each sample draws from ``candidate_size`` random ones.

        Raises:
            ConfigError: ``fea_eval`` is off, or a name is not a slot; nothing was changed.
        """
        _refuse_logical("slots_shuffle", "draws values from all samples of a process")
        samples, form = self._need_samples("slots_shuffle")
        if not self._settings.fea_eval:
            raise ConfigError("slots_shuffle() needs init(fea_eval=True).")
        names = [slot.name for slot in form.slots]
        if isinstance(slots, str) or not isinstance(slots, Sequence) or not all(name in names for name in slots):
            raise ConfigError(f"slots_shuffle({slots!r}) takes a list of slot names; the slots are {names}.")
        count = len(samples)
        candidates = self._settings.candidate_size
        self._replaced = {form.first_slot + names.index(name): replaced_places(count, candidates) for name in slots}

    def set_date(self, date: str) -> NoReturn:
        """Raises UnsupportedOptionError: the day belongs to tables on GPUs."""
        raise UnsupportedOptionError(
            f"set_date({date!r}): in Fleet it sets the day of tables on GPUs; tables live in the servers' host memory."
        )

    def tdm_sample(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UnsupportedOptionError: there is no tree to sample from."""
        raise UnsupportedOptionError("tdm_sample(): tree-based deep match (TDM) is not supported.")

    # ---- batches -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(-(-size // self._settings.batch_size) for size in self._sizes)

    def __iter__(self) -> Iterator[Batch]:
        logical = running_logical()
        # The order as it is now: a shuffle during the loop begins with the next one.
        if logical is None:
            yield from with_rows(self._batches(self._order))
        else:
            yield from batches_in_turns(self, logical, self._of_logical_workers(logical))

    def _of_logical_workers(self, logical: LogicalWorkers) -> Iterator[Batch]:
        """Yields the batches of the logical workers of this process in turn, as long as all in the job have one."""
        self._need_samples("iteration")
        self._check_dealt(logical)
        readers = [self._batches(order) for order in np.split(self._order, np.cumsum(self._sizes)[:-1])]
        for found in whole_rounds([partial(next, reader, None) for reader in readers], "InMemoryDataset"):
            yield from found

    def _batches(self, order: Ints) -> Iterator[Batch]:
        samples, form = self._need_samples("iteration")
        replaced = self._replaced
        size = self._settings.batch_size
        for start in range(0, len(order), size):
            places = order[start : start + size]
            columns = [
                column.gather(replaced[index][places] if index in replaced else places)
                for index, column in enumerate(samples.columns)
            ]
            yield batch_of(Samples(tuple(columns)), form)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _shares(self) -> list[list[str]]:
        """Returns the files of each logical worker of this process; without any, those of the process."""
        logical = running_logical()
        self._is_for = None if logical is None else (logical.num, logical.ranks)
        if logical is None:
            return [list(self.filelist)]
        check_same_files(self.filelist, "InMemoryDataset.set_filelist()")
        return [split_files(self.filelist, rank, logical.num) for rank in logical.ranks]

    def _check_dealt(self, logical: LogicalWorkers) -> None:
        if self._is_for != (logical.num, logical.ranks):
            raise ConfigError(
                "InMemoryDataset: its samples were loaded before 'reproducible' was on, and belong to no logical "
                "worker. Call load_into_memory() after fleet.init(strategy=strategy)."
            )

    def _keep(self, shares: Sequence[Samples], form: TextForm | None) -> None:
        self._samples = shares[0] if len(shares) == 1 else Samples.joined(shares)
        self._form = form
        self._num_shuffled = 0
        self._sizes = [len(samples) for samples in shares]
        self._order = np.arange(len(self._samples))
        self._replaced = {}

    def _need_samples(self, call: str) -> tuple[Samples, TextForm]:
        if self._samples is None or self._form is None:
            raise NotInitializedError(f"InMemoryDataset: {call} needs load_into_memory() first.")
        return self._samples, self._form

    def _total(self, count: int, fleet: Any, call: str) -> int:
        return count if fleet is None else sum_over(worker_group_of(fleet, call), count)


def _refuse_logical(call: str, what: str) -> None:
    if running_logical() is not None:
        raise UnsupportedOptionError(
            f"InMemoryDataset.{call}() {what}, and with 'reproducible' batches must not depend on which process hosts "
            "what. Use local_shuffle(), after a shuffle of the list of files that is the same on all workers, or "
            "fleet.ParquetDataset(shuffle_seed=...), which shuffles the rows of all files."
        )


def _load_shares(shares: list[list[str]], form: TextForm, source: Source, num_threads: int) -> list[Samples]:
    return [_load(files, form, source, num_threads) for files in shares]


def _load(files: list[str], form: TextForm, source: Source, num_threads: int) -> Samples:
    """Returns the samples of all files in order."""
    stop = threading.Event()

    def read(file: str) -> Samples:
        try:
            return Samples.joined([empty_samples(form.dtypes), *read_samples(file, form, source, stop)])
        except BaseException:
            stop.set()  # the other threads end at their next block
            raise

    with ThreadPoolExecutor(max(1, min(num_threads, len(files))), "fleet-dataset") as threads:
        futures = [threads.submit(read, file) for file in files]
        try:
            blocks = [future.result() for future in futures]
        except BaseException as interrupted:
            stop.set()
            threads.shutdown(cancel_futures=True)
            failed = [error for future in futures if not future.cancelled() and (error := future.exception())]
            raise failed[0] if failed else interrupted from None
    return Samples.joined([empty_samples(form.dtypes), *blocks])
