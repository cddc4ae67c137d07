"""Shuffles: random orders, samples to random workers, and merging samples with the same id.

Random numbers come from torch's default generator, so ``torch.manual_seed`` fixes them.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from fleet.dataset.samples import Column, Ints, Samples, empty_samples, samples_from_bytes
from fleet.dataset.text import TextForm
from fleet.dataset.workers import WorkerGroup
from fleet.errors import ConfigError

_ANNOUNCEMENT = struct.Struct("<IQ")  # checksum of the fields of a line, rounds


def random_places(count: int) -> Ints:
    """Returns 0 to ``count - 1`` in random order."""
    places: Ints = torch.randperm(count, device="cpu").numpy()
    return places


def replaced_places(count: int, num_candidates: int) -> Ints:
    """Returns, for each of ``count`` samples, the sample whose values it gets.

    With at least as many candidates as samples the values are permuted; otherwise each sample draws one of
    ``num_candidates`` random candidates.
    """
    places = random_places(count)
    if num_candidates >= count:
        return places
    drawn: Ints = places[:num_candidates][torch.randint(num_candidates, (count,), device="cpu").numpy()]
    return drawn


def choose_workers(count: int, size: int, ids: Column | None) -> Ints:
    """Returns each sample's target worker: random, or by the checksum of its id, so that equal ids meet."""
    if ids is None:
        chosen: Ints = torch.randint(size, (count,), device="cpu").numpy()
        return chosen
    return np.array([zlib.crc32(text) % size for text in ids.octets()], np.int64)


def exchange_samples(
    samples: Samples,
    targets: Ints,
    form: TextForm,
    group: WorkerGroup,
    *,
    send_batch_size: int,
    sleep_s: float,
    num_threads: int,
) -> Samples:
    """Returns this worker's samples once every sample is at its target; every worker calls it at the same point.

    Args:
        samples: this worker's.
        targets: rank of a worker for each of them.
        form: the format of a line; the same on every worker.
        group: the workers.
        send_batch_size: samples in one message to one worker; the messages go in rounds.
        sleep_s: pause after each round.
        num_threads: threads that pack and unpack messages.

    Raises:
        ConfigError: the workers read different slots; raised on every worker before anything is sent.
    """
    # Every worker takes part in as many exchanges as the one with the most samples needs.
    places = [np.flatnonzero(targets == rank) for rank in range(group.size)]
    rounds = -(-max(len(part) for part in places) // send_batch_size)
    rounds = _agree(rounds, form, group)
    # The samples that stay here go in no message.
    kept = [empty_samples(form.dtypes), samples.gather(places[group.rank])]
    places[group.rank] = places[group.rank][:0]
    with ThreadPoolExecutor(min(num_threads, group.size), "fleet-shuffle") as threads:
        for number in range(rounds):
            window = slice(number * send_batch_size, (number + 1) * send_batch_size)
            parts = list(threads.map(lambda part: samples.gather(part[window]).to_bytes(), places))  # noqa: B023
            parts[group.rank] = b""
            found = group.all_to_all_bytes(parts)
            others = [data for rank, data in enumerate(found) if rank != group.rank]
            kept += threads.map(lambda data: samples_from_bytes(data, form.dtypes), others)
            if sleep_s:
                time.sleep(sleep_s)
    group.barrier()
    return Samples.joined(kept)


def _agree(rounds: int, form: TextForm, group: WorkerGroup) -> int:
    """Returns the largest number of rounds of any worker, once all have announced the same fields."""
    fields = [*zip(form.names, form.kinds, form.widths, strict=True), form.whole_batches]
    own = zlib.crc32(repr(fields).encode())
    found = group.all_to_all_bytes([_ANNOUNCEMENT.pack(own, rounds)] * group.size)
    announced: list[tuple[int, int]] = [_ANNOUNCEMENT.unpack(part) for part in found]
    different = [rank for rank, (fields_sum, _) in enumerate(announced) if fields_sum != announced[0][0]]
    if different:
        raise ConfigError(
            f"global_shuffle: workers {different} read different slots than worker 0. Pass init(use_var=...) the same "
            "slots in the same order on every worker."
        )
    return max(number for _, number in announced)


def merge_by_id(samples: Samples, form: TextForm, merge_size: int) -> tuple[Samples, int]:
    """Returns samples merged from groups of ``merge_size`` with the same id, and how many samples were dropped.

    The values of sparse slots are concatenated. Groups of any other size are dropped, and groups whose samples differ
    in a dense slot, because one sample cannot hold both values. The first sample gives the content.
    """
    ids = samples.columns[0].octets()
    order = np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)
    new = np.array([at == 0 or ids[order[at]] != ids[order[at - 1]] for at in range(len(order))], bool)
    starts = np.flatnonzero(new)
    starts = starts[np.diff(np.append(starts, len(order))) == merge_size]
    # Groups that differ in a dense slot fall out one slot after the other, before anything is gathered.
    for index in range(form.first_slot, len(samples.columns)):
        if form.widths[index]:
            starts = starts[_all_equal(samples.columns[index], order, starts, merge_size, form.widths[index])]
    rows = order[(starts[:, None] + np.arange(merge_size)).reshape(-1)]
    columns = []
    for index, column in enumerate(samples.columns):
        if index < form.first_slot or form.widths[index]:
            columns.append(column.gather(rows[::merge_size]))
        else:
            # The samples of a group lie side by side: without the offsets between them they are one sample.
            gathered = column.gather(rows)
            columns.append(Column(gathered.values, np.ascontiguousarray(gathered.offsets[::merge_size])))
    return Samples(tuple(columns)), len(samples) - len(rows)


def _all_equal(column: Column, order: Ints, starts: Ints, merge_size: int, width: int) -> Sequence[bool]:
    rows = order[(starts[:, None] + np.arange(merge_size)).reshape(-1)]
    values = column.gather(rows).values.reshape(len(starts), merge_size, width)
    same: Sequence[bool] = (values == values[:, :1]).all(axis=(1, 2))
    return same
