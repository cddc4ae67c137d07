"""UtilBase, the class of ``fleet.util``: collective operations on host arrays, file shards, printing on one rank.

[Note: Headers]
Before any data, each process leaves a header in the roll call: dtype and shape. So a call that differs between workers,
or that only some make, raises on every rank and names the ranks, where a bare gloo call would hang or abort.
Nothing needs pickle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from fleet.common.file_shard import split_files
from fleet.common.host_array import host_array
from fleet.errors import ConfigError, NotInitializedError, UnsupportedOptionError
from fleet.job.axes import MODEL_AXES
from fleet.job.job_workers import Workers
from fleet.role_maker.record import Role

HostArray: TypeAlias = Any  # an array for an array, a list for a list, a number for a number

_REDUCE = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_KINDS = "biufcSU"
_MAX_DIMS = 16
_SIGN = np.uint64(1 << 63)
_HALF, _LOW = 32, (1 << 32) - 1  # bits of a half, and the lower half


class UtilBase:
    """Collective operations on host arrays among the workers, file shards, and printing on one rank.

    Args:
        job: whose workers exchange; ``None`` takes the running one, for a class that the script assigns to
            ``fleet.util``.

    Example:
        >>> fleet.util.all_reduce(np.array([1.0, 2.0]), "sum")
    """

    running: ClassVar[Callable[[], Workers | None]] = staticmethod(lambda: None)  # the face of the library sets it

    def __init__(self, job: Workers | None = None) -> None:
        self._job = job
        self.fs_client: object = None

    def _set_role_maker(self, role_maker: Any) -> None:
        """Reads rank and size from a role maker where no session runs (Fleet's own way to create a UtilBase)."""
        self._job = Workers(record=role_maker.record, device=torch.device("cpu"), collective=False)

    def set_file_system(self, fs_client: object) -> None:
        """Keeps a file-system client (``fleet.utils.fs``) as ``fs_client`` for the program's own use."""
        self.fs_client = fs_client

    def all_reduce(self, input: Any, mode: str = "sum", comm_world: str = "worker") -> HostArray:
        """Returns the sum, minimum or maximum of ``input`` over all workers.

        Shape and dtype are those of ``input``; a number gives a numpy number, a list a list; int64 and float64 are
        exact. The sum of bool arrays is a count, as int64. bfloat16 gives float32. float16 is summed in float32, and
        infinite beyond 65504.

        Args:
            input: number, list, array or tensor; the same shape and dtype on every worker.
            mode: "sum", "min" or "max".
            comm_world: "worker"; "all" is the same in a job without parameter servers.

        Raises:
            ConfigError: wrong mode or dtype, the workers' inputs differ in shape or dtype, or a sum of integers does
                not fit their dtype.
        """
        if mode not in _REDUCE:
            raise ConfigError(f"all_reduce(mode={mode!r}) takes 'sum', 'min' or 'max'.")
        array = _as_array(input, "all_reduce")
        if array.dtype.kind in "SU" or (array.dtype.kind == "c" and mode != "sum"):
            raise ConfigError(f"all_reduce(mode={mode!r}) cannot reduce an array of dtype {array.dtype}.")
        if array.dtype.kind == "b" and mode == "sum":
            array = array.astype(np.int64)
        group = self._group("all_reduce", comm_world)
        if group is not None:
            job = self._need_job("all_reduce")
            _check_headers(self._meet(f"fleet.util.all_reduce(mode={mode!r})", array), job.global_rank)
            with job.explaining():
                array = _reduce(array, mode, group)
        return array.tolist() if isinstance(input, list) else _number_or_array(array.copy())

    def all_gather(self, input: Any, comm_world: str = "worker") -> list[HostArray]:
        """Returns the ``input`` of every worker, in rank order; numbers, strings or arrays, whose shapes may differ.

        Raises:
            ConfigError: a dtype that cannot be sent, or a worker that calls something else.
        """
        array = _as_array(input, "all_gather")
        group = self._group("all_gather", comm_world)
        if group is None:
            return [_number_or_array(array.copy())]
        headers = self._meet("fleet.util.all_gather()", array)
        with self._need_job("all_gather").explaining():
            return [_number_or_array(found) for found in _gather(array, headers, group)]

    def barrier(self, comm_world: str = "worker") -> None:
        """Returns when every worker has called it.

        Raises:
            ConfigError: a worker calls something else.
        """
        job = self._need_job("barrier")
        if comm_world == "worker" and job.meet_at_server():
            return
        if self._group("barrier", comm_world) is not None:
            job.meet("fleet.util.barrier()")

    def get_file_shard(self, files: Sequence[str]) -> list[str]:
        """Returns this worker's shard of ``files``: a contiguous run; the first workers take one more if needed.

        With fewer files than workers, the last workers get an empty list. Every worker must pass the same list.
        Workers that hold one copy of the model together (mp, pp, sep, cp) get the same shard, as ``fleet.data_rank()``.
        With ``strategy.reproducible`` it is the shard of the logical worker whose turn it is.

        Raises:
            ConfigError: ``files`` is not a list, this process is a parameter server, or it hosts logical workers and
                none of them has its turn.

        Example:
            >>> fleet.util.get_file_shard(["a", "b", "c"])  # worker 0 of 2
            ['a', 'b']
        """
        if not isinstance(files, list):
            raise ConfigError(f"get_file_shard(files) takes a list of file names, got {files!r}.")
        job = self._need_job("get_file_shard")
        if _is_server(job):
            raise ConfigError("get_file_shard() is for workers; this process is a parameter server.")
        logical = job.logical
        if logical is None:
            return split_files(files, job.data_rank, job.data_replicas)
        if not logical.is_open:
            raise ConfigError(
                "get_file_shard(files) was called where no logical worker has its turn: with 'reproducible' a shard "
                "belongs to a logical worker, wherever it is hosted. Give a data set the files of the whole job, "
                "dataset.set_filelist(files): it deals them itself. For data of your own, call get_file_shard() in the "
                "loop over fleet.elastic.logical_ranks()."
            )
        return split_files(files, logical.rank, logical.num)

    def print_on_rank(self, message: object, rank_id: int) -> None:
        """Prints ``message`` on worker ``rank_id`` and nowhere else; raises ConfigError for a rank outside the job."""
        job = self._need_job("print_on_rank")
        if type(rank_id) is not int or not 0 <= rank_id < job.world_size:
            raise ConfigError(f"print_on_rank(rank_id={rank_id!r}) takes a rank from 0 to {job.world_size - 1}.")
        if job.global_rank == rank_id and not _is_server(job):
            print(message, flush=True)

    def reduce_replicas(self, input: Any, mode: str = "sum") -> HostArray:
        """Returns :meth:`all_reduce` of ``input``, with one value for each group of workers that see the same tokens.

        A group's value comes from the last stage of a pipeline, where outputs are, and the first part of divided
        layers. Without mp and pp it is :meth:`all_reduce`.
        """
        if self._counts("all_reduce"):
            return self.all_reduce(input, mode)
        # Every worker makes the call; the others bring a value that changes nothing.
        array = _as_array(input, "all_reduce")
        nothing = np.full_like(array, _neutral(mode, array.dtype))
        return self.all_reduce(nothing.tolist() if isinstance(input, list) else nothing, mode)

    def gather_replicas(self, input: Any) -> list[HostArray]:
        """Returns :meth:`all_gather` of the array ``input`` of one dim, empty for those that :meth:`reduce_replicas`
        does not count."""
        array = _as_array(input, "all_gather")
        return self.all_gather(array if self._counts("all_gather") else array[:0])

    @property
    def stands_for_replica(self) -> bool:
        """Whether :meth:`reduce_replicas` counts this worker."""
        return self._counts("all_reduce")

    def _counts(self, call: str) -> bool:
        """Returns whether this worker stands for its copy of the model: no other gives the same numbers."""
        axes = self._need_job(call).axes
        return axes.size(*MODEL_AXES) == 1 or (axes.rank("pp") == axes.size("pp") - 1 and axes.rank("mp") == 0)

    def _meet(self, call: str, array: np.ndarray[Any, np.dtype[Any]]) -> list[list[int]]:
        """Returns every rank's header: dtype kind, item size in bytes, dimensions."""
        header = [_KINDS.index(array.dtype.kind), array.dtype.itemsize, *array.shape]
        roll_call = self._need_job(call).roll_call
        assert roll_call is not None
        return [json.loads(found) for found in roll_call.meet(call, json.dumps(header))]

    def _need_job(self, call: str) -> Workers:
        job = UtilBase.running() if self._job is None else self._job
        if job is None:
            raise NotInitializedError(f"fleet.util.{call} needs fleet.init() first.")
        return job

    def _group(self, call: str, comm_world: str) -> dist.ProcessGroup | None:
        """Returns the group to use; ``None`` for a single process."""
        job = self._need_job(call)
        if comm_world not in ("worker", "server", "all"):
            raise ConfigError(f"{call}(comm_world={comm_world!r}) takes 'worker', 'server' or 'all'.")
        crosses = comm_world == "server" or (comm_world == "all" and bool(job.record.server_endpoints))
        if crosses or _is_server(job):
            raise UnsupportedOptionError(
                f"{call}(comm_world={comm_world!r}): only workers exchange host arrays. Use comm_world='worker' "
                "on the workers."
            )
        logical = job.logical
        if logical is not None and logical.is_open and not logical.is_last:
            raise ConfigError(
                f"fleet.util.{call}() was called on the batch of logical worker {logical.rank}, and this process has "
                "others in the same round. With 'reproducible' processes host different numbers of them, so the calls "
                "would not match. Use fleet.update_loss(loss) or fleet.log(), or call it where "
                "fleet.update_loss(loss) has returned a number."
            )
        if job.world_size == 1:
            return None
        group: dist.ProcessGroup | None = job.host_group
        if group is None:
            if bool(job.record.server_endpoints):
                raise NotInitializedError(
                    f"fleet.util.{call}: no rendezvous address for host arrays is set. Set PADDLE_MASTER, or "
                    "PADDLE_WITH_GLOO=1 and PADDLE_GLOO_HTTP_ENDPOINT, to host:port of worker 0; the launcher does."
                )
            raise NotInitializedError(f"fleet.util.{call} needs the process group that fleet.init() starts.")
        return group


def _is_server(job: Workers) -> bool:
    return job.record.kind is Role.SERVER


def _as_array(value: Any, call: str) -> np.ndarray[Any, np.dtype[Any]]:
    value = host_array(value)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ConfigError(f"{call}() takes a number or a regular array, got {value!r}: {error}.") from error
    if array.dtype.kind not in _KINDS or array.dtype.itemsize == 0 or array.dtype == np.longdouble:
        if array.dtype.kind in "SU":
            return array.astype(f"{array.dtype.kind}1")
        raise ConfigError(f"{call}() cannot send dtype {array.dtype}; it takes numbers, strings and arrays of them.")
    if array.ndim > _MAX_DIMS:
        raise ConfigError(f"{call}() takes arrays of at most {_MAX_DIMS} dimensions, got {array.ndim}.")
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def _neutral(mode: str, dtype: np.dtype[Any]) -> Any:
    """Returns the value that changes nothing in a reduction."""
    if mode == "sum":
        return 0
    if dtype.kind == "b":
        return mode == "min"
    if dtype.kind == "f":
        return np.inf if mode == "min" else -np.inf
    limits = np.iinfo(dtype)
    return limits.max if mode == "min" else limits.min


def _number_or_array(array: np.ndarray[Any, np.dtype[Any]]) -> HostArray:
    return array[()] if array.ndim == 0 else array


def _check_headers(headers: list[list[int]], rank: int) -> None:
    own = headers[rank]
    other = [index for index, header in enumerate(headers) if header != own]
    if other:
        raise ConfigError(
            f"all_reduce: rank {rank} has {_describe(own)} and rank {other[0]} has {_describe(headers[other[0]])}; "
            "shape and dtype must be the same on every worker."
        )


def _dtype(header: list[int]) -> np.dtype[Any]:
    kind = _KINDS[header[0]]
    size = header[1]
    return np.dtype(f"{kind}{size // 4 if kind == 'U' else size}")


def _describe(header: list[int]) -> str:
    return f"shape {tuple(header[2:])} of {_dtype(header)}"


def _reduce(
    array: np.ndarray[Any, np.dtype[Any]], mode: str, group: dist.ProcessGroup
) -> np.ndarray[Any, np.dtype[Any]]:
    """All-reduces in a dtype gloo supports, chosen so that the result in ``array.dtype`` is exact for integers."""
    dtype = array.dtype
    shape = array.shape
    flat = array.reshape(-1)
    # gloo reduces neither complex numbers nor booleans nor most integers: they travel as numbers that it knows.
    if dtype.kind == "c":
        moved = flat.view(np.float32 if dtype.itemsize == 8 else np.float64)
    elif dtype.kind == "b":
        moved = flat.view(np.uint8)
    elif dtype.kind in "iu" and dtype.itemsize == 8 and mode == "sum":  # in halves, whose sums cannot overflow
        moved = np.concatenate([(flat >> _HALF).astype(np.int64), flat.view(np.int64) & _LOW])
    elif dtype == np.uint64:  # flipping the sign bit keeps the order
        moved = (flat ^ _SIGN).view(np.int64)
    elif dtype == np.float16:
        moved = flat.astype(np.float32)
    elif dtype.kind in "iu" and dtype != np.int64:
        moved = flat.astype(np.int64)
    else:
        moved = flat
    tensor = torch.from_numpy(np.ascontiguousarray(moved).copy())
    dist.all_reduce(tensor, op=_REDUCE[mode], group=group)
    result: np.ndarray[Any, np.dtype[Any]] = tensor.numpy()
    if dtype.kind in "bc":
        result = result.view(dtype)
    elif dtype.kind in "iu" and mode == "sum":
        result = _checked_sum(result, dtype)
    elif dtype == np.uint64:
        result = result.view(np.uint64) ^ _SIGN
    with np.errstate(over="ignore"):  # float16 becomes infinite, as float32 does in its sum
        result = result.astype(dtype, copy=False)
    reshaped: np.ndarray[Any, np.dtype[Any]] = result.reshape(shape)
    return reshaped


def _checked_sum(moved: np.ndarray[Any, np.dtype[Any]], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns sums in ``dtype``, from those of int64 numbers, or of the upper and the lower halves of 64 bits.

    Raises:
        ConfigError: one does not fit, on every worker.
    """
    limits = np.iinfo(dtype)
    if dtype.itemsize < 8:
        wrong = (moved < limits.min) | (moved > limits.max)
        total = moved
    else:
        high, low = np.split(moved, 2)
        high = high + (low >> _HALF)
        wrong = (high < limits.min >> _HALF) | (high > limits.max >> _HALF)
        total = ((high << _HALF) | (low & _LOW)).view(dtype)
    if wrong.any():
        raise ConfigError(
            f"all_reduce: {int(wrong.sum())} sum(s) over the workers do not fit {dtype}, which holds {limits.min} to "
            f"{limits.max}; the first is element {int(np.flatnonzero(wrong)[0])}. Give a wider dtype, such as float64."
        )
    return total


def _gather(
    array: np.ndarray[Any, np.dtype[Any]], headers: list[list[int]], group: dist.ProcessGroup
) -> list[np.ndarray[Any, np.dtype[Any]]]:
    """Moves the arrays as bytes, padded to the longest."""
    sizes = [int(np.prod(header[2:], dtype=np.int64)) * header[1] for header in headers]
    longest = max(sizes)
    if longest == 0:
        return [np.empty(header[2:], _dtype(header)) for header in headers]
    # As bytes, so that strings and all dtypes travel; on the CPU even where the script has set a default device.
    own = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    own[: array.nbytes] = torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy())
    found = [torch.empty_like(own) for _ in headers]
    dist.all_gather(found, own, group=group)
    return [
        np.frombuffer(data[:size].numpy().tobytes(), _dtype(header)).reshape(header[2:]).copy()
        for data, size, header in zip(found, sizes, headers, strict=True)
    ]
