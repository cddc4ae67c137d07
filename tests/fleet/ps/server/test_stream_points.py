"""A server's points of streams: with the push in the journal, in snapshots, in welcomes; overtaken workers."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.errors import PSError
from fleet.ps.server.stream_points import CLOCK, Points
from fleet.ps.wire.messages import Op
from fleet.ps.worker.sender import AsyncSender, HalfAsyncSender, SenderConfig
from tests.fleet.ps.service import gradient, rows, serving


def at(offset: int, first: int = 0, partition: int = 0) -> dict[str, dict[str, tuple[int, int]]]:
    return {"clicks": {str(partition): (first, offset)}}


def point(client, place=CLOCK):
    (welcome,) = client.welcomes()
    return welcome["points"].get(str(place))


def test_a_point_is_what_each_table_and_the_clock_hold() -> None:
    points = Points()
    points.note(3, at(96), tables=[7], ends_step=False)
    points.note(2, at(64), tables=[7], ends_step=True)
    assert points.as_json() == {"-1": [2, {"clicks": {"0": 64}}], "7": [3, {"clicks": {"0": 96}}]}
    assert points.next_of("clicks", "0") == 96
    assert points.next_of("clicks", "1") is points.next_of("views", "0") is None
    again = Points()
    again.restore(points.as_json())
    assert again.as_json() == points.as_json()


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_points_survive_a_restart_of_the_server(mode, snapshot, tmp_path) -> None:
    """Issue 14.2: positions lie in the record of the push; kill -9 is a server that is not closed."""
    with serving(mode=mode, folder=tmp_path) as service:
        client = service.client()
        client.wait(client.push({0: gradient([1])}, positions=at(10)))
        client.wait(client.push({0: gradient([1])}, positions=at(20)))
        if snapshot:
            service.servers[0].snapshot()
        service.servers[0].stop()
        service.start(0)
        again = service.client()
        assert point(again) == [2, {"clicks": {"0": 20}}]
        assert rows(again, [1])[0, 0] == -2
        assert again.step == 2


def test_gradients_in_the_background_carry_positions_and_the_end_of_a_step_carries_them_too() -> None:
    with serving() as service:
        sender = AsyncSender([service.client()], SenderConfig())
        for step in (1, 2, 3):
            sender.put({0: gradient([step])} if step < 3 else {}, step=step, positions=at(10 * step))
        sender.flush()
        again = service.client()
        assert point(again) == [3, {"clicks": {"0": 30}}]
        assert point(again, 0) == [2, {"clicks": {"0": 20}}]
        sender.stop()


def test_a_sum_of_batches_carries_the_positions_of_the_last() -> None:
    with serving() as service:
        sender = HalfAsyncSender(service.client(), 2)
        for step in (1, 2, 3):
            sender.put({0: gradient([step])}, at(10 * step))
        assert point(service.client()) == [1, {"clicks": {"0": 20}}]


def test_a_push_that_is_not_the_last_of_its_step_moves_no_clock() -> None:
    with serving(staleness=1) as service:
        client = service.client()
        client.wait(client.push({0: gradient([1])}, step=1, ends_step=False, positions=at(10)))
        again = service.client()
        assert point(again) is None
        assert point(again, 0) == [1, {"clicks": {"0": 10}}]


def test_every_server_learns_the_positions_though_it_has_no_share() -> None:
    with serving(2) as service:
        client = service.client()
        client.wait(client.push({0: gradient([1])}, positions=at(10)))
        found = [welcome["points"]["-1"] for welcome in service.client().welcomes()]
        assert found == [[1, {"clicks": {"0": 10}}]] * 2


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_that_was_overtaken_is_refused(mode) -> None:
    with serving(num_workers=2, mode=mode, lease_s=1000) as service:
        one, two = service.client(0), service.client(1)
        one.wait(one.push({0: gradient([1])}, positions=at(10)))
        two.wait(two.push({0: gradient([1])}, positions=at(20, first=10)))
        with pytest.raises(PSError, match="worker 1 has taken over partition 0 of 'clicks'.*up to 19.*from 0"):
            one.wait(one.push({0: gradient([1])}, positions=at(15)))
        two.wait(two.push({0: gradient([1])}, positions=at(30, first=10)))
        expected = {"async": -3, "sync": -1}[mode]  # the second step of sync waits for worker 0
        assert rows(service.client(1), [1])[0, 0] == expected


def test_positions_without_a_step_are_refused() -> None:
    with serving() as service:
        client = service.client()
        ticket = client._change(Op.PUSH, {0: gradient([1])}, 0, positions=at(1))
        with pytest.raises(PSError, match="come with a push that has a step"):
            client.wait(ticket)
        assert np.all(rows(client, [1]) == 0)
