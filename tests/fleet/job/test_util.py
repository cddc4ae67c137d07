"""fleet.util: collective operations on host arrays, file shards, printing on one rank."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fleet.errors import ConfigError, NotInitializedError, UnsupportedOptionError
from fleet.job.job import Job
from fleet.job.logical_workers import LogicalWorkers
from fleet.job.util import UtilBase
from fleet.options import DistributedStrategy
from fleet.role_maker import UserDefinedRoleMaker
from fleet.role_maker.record import Role, RoleRecord
from tests.helpers.workers import run_workers


def job_of(record: RoleRecord, **more: Any) -> Job:
    """Returns a job that no session holds."""
    return Job(record=record, device=torch.device("cpu"), options=DistributedStrategy(), say=print, **more)


def alone(rank: int = 0, world_size: int = 1, **more: Any) -> UtilBase:
    """Returns a UtilBase without a process group."""
    record = RoleRecord(global_rank=rank, world_size=world_size, **more)
    return UtilBase(job_of(record, collective=False))


def joined(rank: int, world_size: int) -> UtilBase:
    """Returns the UtilBase of a worker."""
    record = RoleRecord(global_rank=rank, world_size=world_size)
    return UtilBase(job_of(record, process_group=dist.group.WORLD))


def test_a_call_of_all_between_two_batches_of_an_update_is_refused() -> None:
    """Processes host different numbers of logical workers, and so would make different numbers of calls."""
    logical = LogicalWorkers(2, 1, 0)
    util = UtilBase(job_of(RoleRecord(global_rank=0, world_size=1), logical=logical))
    logical.begin_turn(None)
    for call in (lambda: util.all_reduce(1.0), lambda: util.all_gather(1.0), util.barrier):
        with pytest.raises(ConfigError, match="Use fleet.update_loss"):
            call()
    logical.end_turn()
    logical.begin_turn(None)  # the last one: every process makes it
    assert util.all_reduce(1.0) == 1.0


def _reduce_many(rank: int, world_size: int) -> dict[str, Any]:
    util = joined(rank, world_size)
    big = 2**61 + rank
    values: dict[str, Any] = {
        "int64": np.array([big, -big, 7], np.int64),
        "float64": np.array([0.1, 1e300, 3.0]) * (rank + 1),
        "uint64": np.array([6 if rank else 2**63 + 5, rank], np.uint64),
        "int8": np.array([rank, -rank], np.int8),
        "uint32": np.array([0 if rank else 2**32 - 1], np.uint32),
        "float16": np.array([0.5 + rank], np.float16),
        "float32": np.arange(6, dtype=np.float32).reshape(2, 3) + rank,
        "bool": np.array([rank == 0, True, False]),
        "scalar": rank + 1,
        "real": 0.1 * (rank + 1),
        "tensor": torch.arange(3) + rank,
        "empty": np.zeros((0, 3)),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)) + rank,
        "swapped": np.array([1, 2], ">i4") + np.array(rank, ">i4"),
    }
    modes = ("sum", "min", "max")
    results = {f"{mode} {name}": util.all_reduce(v, mode) for mode in modes for name, v in values.items()}
    results["sum complex"] = util.all_reduce(np.array([1 + 2j]) * (rank + 1))
    given = [[rank + 1, 2], [3, 4]]
    assert [util.all_reduce(given), util.all_reduce([0.5])] == [[[3, 4], [6, 8]], [1.0]]
    return {name: (value, str(value.dtype)) for name, value in results.items()}


def test_all_reduce_keeps_shape_dtype_and_every_bit() -> None:
    """B.5: numbers and arrays, in and out; int64 and float64 exact."""
    got, other = run_workers(_reduce_many, 2)
    for name, (value, dtype) in got.items():
        assert np.array_equal(value, other[name][0]), name
        assert dtype == other[name][1]
    expected: dict[str, tuple[Any, str]] = {
        "min int64": ([2**61, -(2**61) - 1, 7], "int64"),
        "max int64": ([2**61 + 1, -(2**61), 7], "int64"),
        "sum float64": ([0.1 + 0.1 * 2, 1e300 + 2e300, 9.0], "float64"),
        "sum int64": ([2**62 + 1, -(2**62) - 1, 14], "int64"),
        "sum uint64": ([2**63 + 11, 1], "uint64"),
        "max uint64": ([2**63 + 5, 1], "uint64"),
        "min uint64": ([6, 0], "uint64"),
        "sum int8": ([1, -1], "int8"),
        "max uint32": ([2**32 - 1], "uint32"),
        "sum uint32": ([2**32 - 1], "uint32"),
        "sum float16": ([2.0], "float16"),
        "sum float32": ([[1, 3, 5], [7, 9, 11]], "float32"),
        "sum bool": ([1, 2, 0], "int64"),
        "min bool": ([False, True, False], "bool"),
        "max bool": ([True, True, False], "bool"),
        "sum scalar": (3, "int64"),
        "sum real": (0.1 + 0.2, "float64"),
        "max tensor": ([1, 2, 3], "int64"),
        "sum fortran": ([[1, 3, 5], [7, 9, 11]], "int64"),
        "sum swapped": ([3, 5], "int32"),
        "sum complex": ([3 + 6j], "complex128"),
    }
    for name, (value, dtype) in expected.items():
        assert np.array_equal(got[name][0], value), (name, got[name][0])
        assert got[name][1] == dtype, name
    assert got["sum empty"][0].shape == (0, 3)
    assert np.ndim(got["sum scalar"][0]) == 0


def _sum_too_much(rank: int, world_size: int) -> dict[str, str]:
    util = joined(rank, world_size)
    edges = {
        "int8": ([64, 0], [63, 0], [64, 0]),
        "uint8": ([0, 128], [0, 127], [0, 128]),
        "int32": ([-(2**30)], [-(2**30)], [-(2**30) - 1]),
        "int64": ([0, 2**62], [0, 2**62 - 1], [0, 2**62]),
        "uint64": ([2**63], [2**63 - 1], [2**63]),
    }
    found = {}
    for dtype, (mine, fits, too_much) in edges.items():
        one, other, third = (np.array(values, dtype) for values in (mine, fits, too_much))
        total = util.all_reduce(other if rank else one)
        limits = np.iinfo(dtype)
        assert total.max() == limits.max or total.min() == limits.min  # the outermost sum that fits
        try:
            found[dtype] = f"{util.all_reduce(third if rank else one)}"
        except ConfigError as error:
            found[dtype] = str(error)
    low = np.array([-(2**62) - rank], np.int64)
    with pytest.raises(ConfigError, match="do not fit int64"):
        util.all_reduce(low)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isinf(util.all_reduce(np.array([40000.0], np.float16))).all()
    return found


def test_a_sum_of_integers_that_does_not_fit_is_refused_on_every_worker() -> None:
    """It wrapped: 100 + 100 in int8 was -56."""
    one, other = run_workers(_sum_too_much, 2)
    assert one == other
    for dtype, text in one.items():
        assert f"1 sum(s) over the workers do not fit {dtype}, which holds" in text, text
        assert "Give a wider dtype, such as float64." in text


def _gather_many(rank: int, world_size: int) -> list[Any]:
    util = joined(rank, world_size)
    util.barrier()
    return [
        util.all_gather(rank * 2.5),
        util.all_gather(np.arange(rank + 1, dtype=np.int16)),
        util.all_gather(np.full((rank, 2), 2**63 + 1, np.uint64)),
        [str(found) for found in util.all_gather("wort" * (rank + 1))],
        util.all_gather(np.zeros((0,))),
        util.all_gather(np.float32(1) if rank else np.int64(2)),
    ]


def test_all_gather_in_rank_order_with_different_shapes() -> None:
    """B.5."""
    for results in run_workers(_gather_many, 3):
        numbers, rising, wide, words, empty, mixed = results
        assert [float(number) for number in numbers] == [0.0, 2.5, 5.0]
        assert [found.tolist() for found in rising] == [[0], [0, 1], [0, 1, 2]]
        assert [found.shape for found in wide] == [(0, 2), (1, 2), (2, 2)]
        assert wide[2].dtype == np.uint64
        assert wide[2][0, 0] == 2**63 + 1
        assert words == ["wort", "wortwort", "wortwortwort"]
        assert [found.shape for found in empty] == [(0,)] * 3
        assert [str(found.dtype) for found in mixed] == ["int64", "float32", "float32"]


def _disagree(rank: int, world_size: int) -> list[str]:
    util = joined(rank, world_size)
    calls = [
        lambda: util.all_reduce(np.zeros(2 + rank)),
        lambda: util.all_reduce(np.zeros(2, np.float32 if rank else np.float64)),
        lambda: util.all_reduce(1, "sum" if rank else "max"),
        lambda: util.barrier() if rank else util.all_gather(1),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except ConfigError as error:
            messages.append(str(error))
    messages.append(str(util.all_reduce(1)))
    return messages


def test_workers_that_disagree_are_told_instead_of_hanging() -> None:
    for shape, dtype, mode, operation, after in run_workers(_disagree, 2):
        assert "shape (2,)" in shape
        assert "shape (3,)" in shape
        assert "float32" in dtype
        assert "'max'" in mode
        assert "rank 1: fleet.util.barrier() at " in operation
        assert "rank 0: fleet.util.all_gather() at " in operation
        assert after == "2"


def _late(rank: int, world_size: int) -> tuple[float, float]:
    """Returns when this worker came to the barrier, and when it went on, by the clock of the machine."""
    util = joined(rank, world_size)
    util.barrier()
    if rank == 1:
        time.sleep(0.5)
    came = time.monotonic()
    util.barrier("all")
    return came, time.monotonic()


def test_a_barrier_waits_for_the_last() -> None:
    came, went_on = zip(*run_workers(_late, 2), strict=True)
    assert min(went_on) >= max(came)


def test_a_single_process_gets_its_own_values() -> None:
    util = alone()
    given = np.array([1.0, 2.0])
    result = util.all_reduce(given)
    result[0] = 9.0  # type: ignore[index]
    assert given.tolist() == [1.0, 2.0]
    assert util.all_reduce(True) == 1
    assert util.all_reduce([[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
    assert util.all_gather(3) == [3]
    util.barrier()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda util: util.all_reduce(1, "mean"), "mode='mean'"),
        (lambda util: util.all_reduce("text"), "dtype"),
        (lambda util: util.all_reduce(np.array([1j]), "max"), "complex"),
        (lambda util: util.all_reduce([object()]), "dtype object"),
        (lambda util: util.all_reduce([[1], [1, 2]]), "regular array"),
        (lambda util: util.all_reduce(2**70), "dtype object"),
        (lambda util: util.all_gather(np.datetime64("2020-01-01")), "datetime64"),
        (lambda util: util.all_gather(None), "dtype object"),
        (lambda util: util.barrier("everyone"), "comm_world='everyone'"),
        (lambda util: util.barrier("server"), "comm_world='server'"),
        (lambda util: util.print_on_rank("x", 1), "rank_id=1"),
        (lambda util: util.get_file_shard("a,b"), "takes a list"),
        (lambda util: util.get_file_shard(("a",)), "takes a list"),
    ],
)
def test_bad_arguments_are_refused(call: Any, message: str) -> None:
    """B.5: a list is asked for, and a TypeError is raised otherwise."""
    with pytest.raises(ConfigError, match=message) as caught:
        call(alone())
    assert isinstance(caught.value, TypeError)


def test_file_shards() -> None:
    """B.5: the first workers take one more, late ones get an empty list."""
    files = ["a", "b", "c", "d", "e"]
    assert [alone(rank, 3).get_file_shard(files) for rank in range(3)] == [["a", "b"], ["c", "d"], ["e"]]
    assert alone(2, 3).get_file_shard(["a"]) == []


def test_a_server_has_no_shard_and_no_worker_collectives() -> None:
    record = RoleRecord(kind=Role.SERVER, server_endpoints=("a:1",))
    server = UtilBase(job_of(record))
    with pytest.raises(ConfigError, match="parameter server"):
        server.get_file_shard(["a"])
    with pytest.raises(UnsupportedOptionError, match="worker"):
        server.all_reduce(1)


def test_all_is_the_workers_where_there_are_no_servers() -> None:
    assert alone().all_reduce(2, comm_world="all") == 2
    with pytest.raises(UnsupportedOptionError, match="comm_world='all'"):
        alone(server_endpoints=("a:1",)).all_reduce(2, comm_world="all")


def test_print_on_rank(capsys: pytest.CaptureFixture[str]) -> None:
    alone(0, 2).print_on_rank("hello", 1)
    assert capsys.readouterr().out == ""
    alone(1, 2).print_on_rank("hello", 1)
    assert capsys.readouterr().out == "hello\n"


def test_before_init(monkeypatch: pytest.MonkeyPatch) -> None:
    # An earlier test may have left one.
    monkeypatch.setattr("fleet.job.util.UtilBase.running", staticmethod(lambda: None))
    for call in (lambda util: util.all_reduce(1), lambda util: util.get_file_shard([]), lambda util: util.barrier()):
        with pytest.raises(NotInitializedError, match=r"fleet.init\(\)"):
            call(UtilBase())
    with pytest.raises(NotInitializedError, match="process group"):
        alone(0, 2).all_reduce(1)


def test_a_role_maker_is_enough_for_file_shards() -> None:
    util = UtilBase()
    endpoints = ["a:1", "b:1"]
    util._set_role_maker(UserDefinedRoleMaker(is_collective=True, current_id=1, worker_endpoints=endpoints))
    assert util.get_file_shard(["x", "y", "z"]) == ["z"]


def test_the_file_system_is_kept() -> None:
    util, client = alone(), object()
    util.set_file_system(client)
    assert util.fs_client is client
