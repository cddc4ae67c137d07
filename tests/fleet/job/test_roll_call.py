"""What every worker must call and only some do: an error that says who is where. Honest slowness is only reported."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fleet
from fleet.errors import ConfigError, RendezvousError
from fleet.job.process_group import restarted_key
from fleet.job.roll_call import RollCall
from tests.helpers.workers import WorkerError, run_workers

SOON = {"FLEET_WAIT_LIMIT": "1"}


def _message(call: Any, kind: type[Exception] = RendezvousError) -> str:
    """Returns what ``call`` raises, and raises when it takes much longer than the limit."""
    began = time.monotonic()
    try:
        call()
    except kind as error:
        assert time.monotonic() - began < 15.0
        return f"{error}"
    raise AssertionError("nothing was raised")


def _session(**options: Any) -> Any:
    strategy = fleet.DistributedStrategy()
    for name, value in options.items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    return fleet.session


def _stop(session: Any) -> None:
    """Ends the part of a worker whose error was looked at; the others' exchanges with it break off."""
    session.close()
    dist.destroy_process_group()


def _texts(rank: int, world_size: int) -> list[list[str]]:
    roll_call = RollCall(rank, world_size, lambda: 0, 30.0, 60.0)
    found = [roll_call.meet("hello", f"{rank} {n}") for n in range(3)]
    left = dist.distributed_c10d._get_default_store().num_keys()
    found += [roll_call.meet("hello") for _ in range(20)]
    grown = dist.distributed_c10d._get_default_store().num_keys() - left
    roll_call.close()
    assert grown < 10, grown
    return found[:3]


def test_every_worker_gets_every_text_and_no_keys_are_left() -> None:
    expected = [[f"{rank} {n}" for rank in range(3)] for n in range(3)]
    assert run_workers(_texts, 3) == [expected] * 3


def _rank_0_saves_alone(rank: int, world_size: int, folder: str) -> str:
    session = _session()
    model = fleet.distributed_model(torch.nn.Linear(2, 2))
    checkpoint = fleet.elastic.Checkpoint(folder, model)
    model(torch.ones(1, 2)).sum().backward()  # the first one compares the workers' states
    if rank == 0:
        said = _message(checkpoint.save)
        _stop(session)
        return said
    with pytest.raises((RuntimeError, RendezvousError), match=r"[Cc]onnection|exchange"):
        model(torch.ones(1, 2)).sum().backward()
    return ""


def test_a_checkpoint_that_rank_0_saves_alone(tmp_path: Any) -> None:
    """30 minutes of silence before: the others train on, and wait for rank 0 in their backward."""
    said = run_workers(_rank_0_saves_alone, 2, str(tmp_path), backend=None, environment=SOON)[0]
    assert "Checkpoint.save() at " in said
    assert "rank 1 cannot:" in said
    assert "rank 1: waits in an exchange at " in said
    assert "`model(torch.ones(1, 2)).sum().backward()`" in said
    assert "`said = _message(checkpoint.save)`" in said or "`call()`" in said


def _rank_0_gathers_alone(rank: int, world_size: int, stage: int) -> str:
    session = _session(sharding=True, sharding_configs={"stage": stage, "sharding_degree": 2})
    optimizer = fleet.distributed_optimizer(torch.optim.Adam((net := torch.nn.Linear(2, 2)).parameters()))
    model = fleet.distributed_model(net)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    said = ""
    if rank == 0:
        said = _message((optimizer if stage == 1 else model).full_state_dict)
    _stop(session)
    return said


@pytest.mark.parametrize(("stage", "call"), [(1, "optimizer.full_state_dict()"), (3, "model.full_state_dict()")])
def test_a_state_that_rank_0_gathers_alone(stage: int, call: str) -> None:
    said = run_workers(_rank_0_gathers_alone, 2, stage, backend=None, environment=SOON)[0]
    assert f"{call} at " in said
    assert "rank 1: has ended, after step 1" in said


def _whole_state_of_whole_parameters(rank: int, world_size: int) -> int:
    _session()
    model = fleet.distributed_model(torch.nn.Linear(2, 2))
    return len(model.full_state_dict()) if rank == 0 else 2


def test_where_nothing_is_divided_a_state_needs_nobody() -> None:
    assert run_workers(_whole_state_of_whole_parameters, 2, backend=None, environment=SOON) == [2, 2]


def _different_calls(rank: int, world_size: int) -> str:
    _session()
    return _message(fleet.barrier_worker if rank else (lambda: fleet.all_reduce(3)), ConfigError)


def test_different_calls_are_named_with_their_lines() -> None:
    for said in run_workers(_different_calls, 3, backend=None):
        assert "rank 0: fleet.util.all_reduce(mode='sum') at " in said
        assert "ranks 1, 2: fleet.util.barrier() at " in said
        assert "test_roll_call.py:" in said


def _busy(rank: int, world_size: int, in_step: bool) -> list[str]:
    session = _session()
    fleet.set_log_level("WARNING")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("FLEET").addHandler(handler)
    model = fleet.distributed_model(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()  # the first one compares the workers' states
    fleet.util.barrier()
    said.clear()
    if rank == 1:
        time.sleep(3.0)  # honest work
    if in_step:
        model(torch.ones(1, 2)).sum().backward()
    else:
        fleet.util.barrier()
    session.close()
    return said


@pytest.mark.parametrize("in_step", [False, True])
def test_a_busy_worker_is_waited_for_and_named(in_step: bool) -> None:
    said = run_workers(_busy, 2, in_step, backend=None, environment=SOON)
    assert "rank 1: is busy at " in said[0][0], said
    assert "`time.sleep(3.0)  # honest work`" in said[0][0]
    assert said[1] == []


def _two_exchanges(rank: int, world_size: int) -> None:
    _session()
    model = fleet.distributed_model(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()  # the first one compares the workers' states
    with fleet.session.job.explaining():  # the other one has ended
        if rank == 0:
            model(torch.ones(1, 2)).sum().backward()
        else:
            dist.barrier()


def test_workers_in_different_exchanges_stop() -> None:
    """Each waits in C++, where nothing can be raised: the process ends with the message."""
    with pytest.raises(WorkerError) as caught:
        run_workers(_two_exchanges, 2, backend=None, environment=SOON)
    said = f"{caught.value}"
    assert "RendezvousError: [rank " in said
    assert re.search(r"cannot finish:\n  rank 0: waits in|rank [01]: has ended", said)


def _ended(rank: int, world_size: int) -> str:
    session = _session()
    if rank == 0:
        return _message(fleet.barrier_worker)
    session.close()
    time.sleep(4.0)
    return ""


def test_a_worker_that_has_ended_is_not_waited_for() -> None:
    said = run_workers(_ended, 2, backend=None, environment={"FLEET_WAIT_LIMIT": "60"})[0]
    assert "rank 1: has ended, after step 0" in said


def _restarted(rank: int, world_size: int) -> str:
    session = _session()
    if rank == 0:
        return _message(fleet.barrier_worker)
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    store.set(restarted_key(rank), "1")  # as the process does that takes this one's place
    time.sleep(4.0)
    session.close()
    return ""


def test_a_worker_that_was_restarted_alone_ends_the_others() -> None:
    """It waits until all join it; they would wait for its predecessor."""
    said = run_workers(_restarted, 2, backend=None, environment={"FLEET_WAIT_LIMIT": "60"})[0]
    assert "rank 1 ended, was restarted and waits until all workers join anew" in said
    assert "--max_restart" in said


def _rank_0_leaves_first(rank: int, world_size: int) -> bool:
    session = _session()
    if rank == 1:
        time.sleep(0.5)
    fleet.util.barrier()
    session.close()
    dist.destroy_process_group()  # rank 0 serves the store
    return True


def test_rank_0_leaves_when_the_others_have_read_the_last_meeting() -> None:
    assert run_workers(_rank_0_leaves_first, 3, backend=None) == [True] * 3


def _wrong_limit(rank: int, world_size: int) -> str:
    return _message(lambda: fleet.init(is_collective=True), ConfigError)


def test_a_wrong_limit_is_refused() -> None:
    said = run_workers(_wrong_limit, 2, backend=None, environment={"FLEET_WAIT_LIMIT": "-1"})
    assert all("FLEET_WAIT_LIMIT is -1" in text for text in said)
