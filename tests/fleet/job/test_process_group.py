"""The start of the process group names the absent ranks, listens on one address, and uses an agent's store."""

from __future__ import annotations

import re
import socket
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fleet import fleet
from fleet.errors import ConfigError, RendezvousError
from fleet.job.process_group import Meeting, check_cards, is_in_group, start_process_group
from fleet.job.running import running_session
from fleet.strategies._gradients.gradient_exchange import data_parallel_in
from tests.helpers.workers import free_ports, run_workers


def meeting(rank: int, world_size: int, port: int, **changes: Any) -> Meeting:
    """Returns a meeting on loopback."""
    settings = {"host": "127.0.0.1", "backend": "gloo", "wait_s": 20.0, "operation_s": 20.0}
    return Meeting(global_rank=rank, world_size=world_size, port=port, **{**settings, **changes})


def test_workers_that_share_a_gpu_are_named() -> None:
    """NCCL says "invalid usage" there; with a GPU for each worker, on any machine, nothing is said."""
    store = dist.HashStore()
    for rank, card in enumerate(("a 0", "a 1", "b 0", "a 0")):
        store.set(f"fleet/card/{rank}", card)
    check_cards(store, meeting(0, 3, 0), "a 0")
    with pytest.raises(ConfigError, match=r"workers \[0, 3\] share GPUs with others.*PADDLE_DISTRI_BACKEND=gloo"):
        check_cards(store, meeting(2, 4, 0), "b 0")


def test_a_group_of_nccl_is_refused_where_workers_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    with pytest.raises(
        ConfigError, match=r"is NCCL.s\. Call fleet.init\(\) first .*=nccl, which needs a GPU for each worker"
    ):
        start_process_group(meeting(0, 2, 0, device=torch.device("cuda", 0)), print)


def wait_alone(rank: int, world_size: int, port: int, wait_s: float) -> dict[str, Any]:
    """Rank 0 and 1 come, rank 2 does not."""
    said: list[str] = []
    start = time.monotonic()
    try:
        start_process_group(meeting(rank, 3, port, wait_s=wait_s), said.append)
    except RendezvousError as error:
        return {"error": str(error), "said": "\n".join(said), "took_s": time.monotonic() - start}
    return {}


def test_absent_ranks_are_listed() -> None:
    """003-36, 002-27: after the timeout the error lists who did not come; meanwhile a line says who is waited for."""
    (port,) = free_ports(1)
    for result in run_workers(wait_alone, 2, port, 4.0, backend=None):
        # Rank 0 serves the meeting point and may give up a moment before rank 1 does.
        assert re.search(r"absent ranks (after 4 s|when last seen): \[2\]", result["error"]), result["error"]
        assert "not ready ranks [2]" in result["said"]
        assert result["took_s"] < 10


def wait_for_rank_0(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Rank 0 never comes; this process is rank 1."""
    said: list[str] = []
    with pytest.raises(RendezvousError) as caught:
        start_process_group(meeting(1, 2, port, wait_s=3.5), said.append)
    return {"error": str(caught.value), "said": "\n".join(said)}


def test_absent_rank_0_is_named() -> None:
    """003-36, 002-27: rank 0 serves the meeting point; its absence is an error that says so, not a hang."""
    (port,) = free_ports(1)
    result = run_workers(wait_for_rank_0, 1, port, backend=None)[0]
    assert "Absent ranks: [0]" in result["error"]
    assert f"not ready endpoints:['127.0.0.1:{port}']" in result["said"]


def reduce_and_list_listeners(rank: int, world_size: int, port: int) -> list[str]:
    """Starts the group, reduces, and returns the addresses on which this process listens."""
    start_process_group(meeting(rank, world_size, port), print)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    return listening_addresses()


def listening_addresses() -> list[str]:
    """Returns the local addresses of this process's listening TCP sockets, as hexadecimal from the kernel's table."""
    from pathlib import Path

    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_every_socket_listens_on_loopback() -> None:
    """Security 2: on one node nothing listens on another address than loopback."""
    (port,) = free_ports(1)
    results = run_workers(reduce_and_list_listeners, 2, port, backend=None, environment={"GLOO_SOCKET_IFNAME": "lo"})
    assert results[0]
    loopback = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
    assert {address for result in results for address in result} <= loopback


def meet_in_agents_store(rank: int, world_size: int, port: int) -> float:
    """Joins through a store that another process serves."""
    start_process_group(meeting(rank, world_size, port, agent_store=True), print)
    total = torch.full((1,), float(rank))
    dist.all_reduce(total)
    return total.item()


def test_agents_store_is_used() -> None:
    """Under torchrun the agent serves the store and every rank is a client."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    assert run_workers(meet_in_agents_store, 2, store.port, backend=None) == [1.0, 1.0]


def test_port_in_use_is_a_clear_error() -> None:
    """C.3: a busy port fails clearly."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(RendezvousError, match=r"cannot listen on 127.0.0.1:\d+: Address already in use"):
            start_process_group(meeting(0, 2, busy.getsockname()[1]), print)


def use_collectives() -> list[float]:
    """Returns what a script of one process gets from collectives that nobody started a group for."""
    fleet.init(is_collective=True, log_level="ERROR")
    ones = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of torch.distributed.nn
        from torch.distributed.nn.functional import all_gather

        total = torch.cat(all_gather(ones)).sum()
    total.backward()
    torch.distributed.all_reduce(total)
    assert ones.grad is not None
    return [total.item(), *ones.grad.tolist(), torch.distributed.get_rank(), torch.distributed.get_world_size()]


def test_one_process_gets_a_group_of_its_own() -> None:
    """Issue 36: a moved script failed on one worker. The job itself exchanges with nobody, also after another init."""
    for _ in range(2):
        assert use_collectives() == [2.0, 1.0, 1.0, 0, 1]
        session = running_session()
        assert session is not None
        assert session.job.process_group is session.job.roll_call is None
        model = fleet.distributed_model(torch.nn.Linear(2, 2))
        assert data_parallel_in(model._chain) is None
    assert not is_in_group()
