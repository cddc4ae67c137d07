"""The workers of a job, as datasets see them: a WorkerGroup to exchange samples, this worker's place, its batch loops.

``global_shuffle`` accepts any object with the four members of WorkerGroup; ``fleet`` gives one over its gloo group.

[Note: Batches of logical workers]
In a reproducible job a dataset reads a share for each logical worker, as that many processes would, and gives one batch
of each in turn. So the batches of a logical worker are the same wherever it is hosted. All have equally many: an epoch
ends, on all processes at once, before the first round for which some logical worker has no batch left.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from fleet.elastic.logical_loop import turns
from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.job.axes import DATA_AXES, Axes
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.running import running_session
from fleet.training.batch_loops import BatchLoops

if TYPE_CHECKING:
    from fleet.job.session import Session

_Batch = TypeVar("_Batch")
Buffer: TypeAlias = bytes | bytearray | memoryview
_NUMBER = struct.Struct("<q")


@runtime_checkable
class WorkerGroup(Protocol):
    """All workers of a job. Every worker makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This worker, from 0."""

    @property
    def size(self) -> int:
        """Number of workers."""

    def all_to_all_bytes(self, parts: Sequence[Buffer]) -> list[bytes]:
        """Sends ``parts[i]`` to worker i, and returns the parts that the workers sent to this one, in rank order."""

    def barrier(self) -> None:
        """Returns when every worker has called it."""


class OneWorker:
    """The group of a single-worker job."""

    rank = 0
    size = 1

    def all_to_all_bytes(self, parts: Sequence[Buffer]) -> list[bytes]:
        """Returns the part for this worker."""
        return [bytes(part) for part in parts]

    def barrier(self) -> None:
        """Returns."""


class GlooWorkers:
    """The workers of a process group that moves CPU tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_to_all_bytes(self, parts: Sequence[Buffer]) -> list[bytes]:
        """Sends ``parts[i]`` to worker i: first all sizes, then all bytes."""
        sizes = torch.tensor([memoryview(part).nbytes for part in parts], dtype=torch.int64)
        coming = torch.empty_like(sizes)
        dist.all_to_all_single(coming, sizes, group=self._group)
        out = sizes.tolist()
        into = coming.tolist()
        # One copy into one array: joined bytes would be read-only, which torch warns about.
        sent = np.empty(sum(out), np.uint8)
        at = 0
        for part, size in zip(parts, out, strict=True):
            sent[at : at + size] = np.frombuffer(part, np.uint8)
            at += size
        received = torch.empty(sum(into), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.from_numpy(sent), into, out, group=self._group)
        return [part.numpy().tobytes() for part in received.split(into)]

    def barrier(self) -> None:
        """Returns when every worker has called it."""
        dist.barrier(self._group)


class ReplicaWorkers(GlooWorkers):
    """One worker of every copy of the model: workers that train on different rows and hold the same part of it.

    Args:
        group: the process group of all workers.
        axes: the place of this worker.
    """

    def __init__(self, group: dist.ProcessGroup, axes: Axes) -> None:
        super().__init__(group)
        self._all = self.size
        self._ranks = axes.ranks(*DATA_AXES)
        self._leader = axes.ranks(*(axis for axis in axes.degrees if axis not in DATA_AXES))[0]
        self.rank = axes.data_rank
        self.size = axes.data_replicas

    def all_to_all_bytes(self, parts: Sequence[Buffer]) -> list[bytes]:
        """Sends ``parts[i]`` to replica i; see :class:`WorkerGroup`."""
        # The group is of all workers: the others get empty parts, as in every copy of the model at the same time.
        addressed: list[Buffer] = [b""] * self._all
        for rank, part in zip(self._ranks, parts, strict=True):
            addressed[rank] = part
        found = super().all_to_all_bytes(addressed)
        return [found[rank] for rank in self._ranks]

    @contextmanager
    def same_draws(self) -> Iterator[None]:
        """Makes torch draw the same random numbers on all workers of one copy of the model; every worker calls it."""
        own = _NUMBER.pack(int(torch.randint(2**62, ())))
        found = super().all_to_all_bytes([own] * self._all)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_NUMBER.unpack(found[self._leader])[0])
            yield


def same_draws(group: WorkerGroup) -> AbstractContextManager[None]:
    """Returns a context in which workers that must get the same samples draw the same random numbers."""
    return group.same_draws() if isinstance(group, ReplicaWorkers) else nullcontext()


def worker_group_of(fleet: Any, call: str) -> WorkerGroup:
    """Returns the workers of ``fleet``: its session's, or ``fleet`` itself when it is a :class:`WorkerGroup`.

    Raises:
        ConfigError: something else, or a process that is a parameter server.
        NotInitializedError: ``fleet.init`` was not called.
        UnsupportedOptionError: the workers of this job have no process group.
    """
    if isinstance(fleet, WorkerGroup):
        return fleet
    if not hasattr(type(fleet), "session") and getattr(fleet, "__name__", "") != "fleet":
        raise ConfigError(f"{call}(fleet={fleet!r}) takes fleet after fleet.init(), or None for only this worker.")
    return _group_of(fleet.session, call)


def _group_of(session: Session | None, call: str) -> WorkerGroup:
    assert session is not None
    if not session.role_maker.is_worker():
        raise ConfigError(f"{call}(fleet) is for workers; this process is a parameter server.")
    if session.job.world_size == 1:
        return OneWorker()
    group = session.job.host_group
    if group is None:
        raise UnsupportedOptionError(
            f"{call}(fleet): the {session.job.world_size} workers of this job have no rendezvous address. Start it "
            "with --with_gloo=1, or set PADDLE_WITH_GLOO=1 and PADDLE_GLOO_HTTP_ENDPOINT to host:port of worker 0, or "
            "call it without fleet, for only this worker's samples."
        )
    replicas = session.job.data_replicas
    if replicas == session.job.world_size:
        return GlooWorkers(group)
    return ReplicaWorkers(group, session.job.axes)


def data_place() -> tuple[int, int]:
    """Returns this worker's number among the workers with different rows, and how many these are."""
    session = running_session()
    return (0, 1) if session is None else (session.job.data_rank, session.job.data_replicas)


def listened_batches(dataset: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Returns the batches of a loop over ``dataset``, which the job's listeners learn of."""
    session = running_session()
    return batches if session is None else session.job.listeners.get(BatchLoops).over(dataset, batches)


def sum_over(group: WorkerGroup, value: int) -> int:
    """Returns the sum of ``value`` over the workers."""
    found = group.all_to_all_bytes([_NUMBER.pack(value)] * group.size)
    return sum(int(_NUMBER.unpack(part)[0]) for part in found)


# ---- reproducible jobs, see [Note: Batches of logical workers] ---------------------------------------------------


def batches_in_turns(dataset: Any, logical: LogicalWorkers, batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Yields ``batches``, one for each logical worker of this process in each round, in their turns."""
    logical.begin_loop()
    yield from listened_batches(dataset, turns(logical, dataset, batches))


def whole_rounds(following: Sequence[Callable[[], _Batch | None]], call: str) -> Iterator[list[_Batch]]:
    """Yields the next batch of each logical worker of this process, as long as all in the job have one.

    Every process calls it at the same point; each round has a small exchange.

    Args:
        following: return the next batch of a logical worker each; ``None`` at its end.
        call: the dataset, for errors.
    """
    group = _group_of(running_session(), call)
    while True:
        found: list[_Batch] = []
        for one in following:
            if (batch := one()) is None:
                break
            found.append(batch)
        if sum_over(group, len(following) - len(found)):
            return
        yield found


def check_same_files(files: Sequence[str], call: str) -> None:
    """Raises ConfigError on all processes unless they have the same ``files``; every process calls it."""
    group = _group_of(running_session(), call)
    own = _NUMBER.pack(zlib.crc32("\n".join(files).encode()))
    found = group.all_to_all_bytes([own] * group.size)
    if different := [rank for rank, part in enumerate(found) if part != found[0]]:
        raise ConfigError(
            f"{call}: workers {different} have other files than worker 0. With 'reproducible' every worker has the "
            "files of the whole job, set_filelist(files), of which each logical worker reads its shard. Leave "
            "get_file_shard() out, and name the files alike."
        )
