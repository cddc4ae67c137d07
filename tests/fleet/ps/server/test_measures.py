"""What a server and a worker measure of themselves (fleet.ps.server.measures)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fleet.ps.server.measures import Summary, resident_bytes, server_measures
from tests.fleet.ps.publishing.rig import PublishingService
from tests.fleet.ps.service import DENSE, SPARSE, gradient, serving
from tests.helpers.memory_sink import MemorySink


def values(state: object) -> dict[str, object]:
    return {found.name: found.samples if found.label else found.value for found in server_measures(state)}  # type: ignore[arg-type]


def test_a_sync_server_counts_what_waits_and_who_is_behind() -> None:
    with serving(mode="sync", num_workers=2) as service:
        ahead, behind = (service.client(rank, tables={0: SPARSE, 1: DENSE}) for rank in range(2))
        state = service.servers[0].state
        for _ in range(3):
            ahead.wait(ahead.push({0: gradient([1, 2, 3])}))
        behind.wait(behind.push({0: gradient([1])}))
        found = values(state)
        assert found["waiting_gradients"] == 2
        assert found["staleness_steps"] == 2
        assert found["worker_steps"] == {"0": 3.0, "1": 1.0}
        assert found["workers"] == {"active": 2.0}
        assert found["table_rows"] == {"ads": 3.0}
        assert found["table_elements"] == {"mlp": 5.0}
        assert found["pushed_rows"] == 3
        assert found["pulled_rows"] == 0


def test_how_far_streams_are_of_the_worker_that_is_furthest(monkeypatch, tmp_path) -> None:
    now = [100.0]
    monkeypatch.setattr("fleet.ps.server.stream_points.time.monotonic", lambda: now[0])
    monkeypatch.setattr("fleet.ps.server.measures.time.monotonic", lambda: now[0])
    with serving(num_workers=2, folder=tmp_path) as service:
        client, other = service.client(0), service.client(1)
        state = service.servers[0].state
        assert "stream_next_offset" not in values(state)
        client.wait(client.push({0: gradient([1])}, positions={"clicks": {"0": (0, 10), "2": (0, 7)}}))
        now[0] = 103.0
        client.wait(client.push({0: gradient([1])}, positions={"clicks": {"0": (0, 20), "2": (0, 7)}}))
        now[0] = 104.0
        client.wait(client.push({}, step=3, positions={"clicks": {"0": (0, 20), "2": (0, 7)}}))
        now[0] = 103.0
        other.wait(other.push({0: gradient([1])}, positions={"clicks": {"2": (7, 9)}}))
        now[0] = 105.0
        found = values(state)
        assert found["stream_next_offset"] == {("clicks", "0"): 20.0, ("clicks", "2"): 9.0}
        assert found["stream_age_seconds"] == {("clicks", "0"): 2.0, ("clicks", "2"): 2.0}
        service.servers[0].stop()
        service.start(0)
        now[0] = 106.0
        restarted = values(service.servers[0].state)
        assert restarted["stream_next_offset"] == found["stream_next_offset"]
        assert restarted["stream_age_seconds"] == {("clicks", "0"): 1.0, ("clicks", "2"): 1.0}


def test_hits_are_counted_for_each_table() -> None:
    with serving(2) as service:
        client = service.client(tables={0: SPARSE, 1: DENSE})
        client.wait(client.pull({0: np.array([1, 2, 3]), 1: None}))  # makes no row
        client.wait(client.push({0: gradient([1, 2, 3, 7, 8])}))
        client.wait(client.pull({0: np.array([3, 2, 1, 4, 4])}))  # three have a row
        client.wait(client.pull({0: np.array([7, 9])}, create=False))
        found = [values(server.state) for server in service.servers]
        assert sum(one["asked_ids"]["ads"] for one in found) == 10  # type: ignore[index]
        assert sum(one["found_ids"]["ads"] for one in found) == 4  # type: ignore[index]
        assert "mlp" not in found[0]["asked_ids"]  # type: ignore[operator]


def test_rows_and_dense_elements_are_counted_apart() -> None:
    with serving() as service:
        client = service.client(tables={0: SPARSE, 1: DENSE})
        state = service.servers[0].state
        client.wait(client.push({0: gradient([1, 2, 3]), 1: np.ones(5, np.float32)}))
        client.wait(client.pull({0: np.array([1, 2]), 1: None}))
        found = values(state)
        assert (found["pushed_rows"], found["pushed_elements"]) == (3, 5)
        assert (found["pulled_rows"], found["pulled_elements"]) == (2, 5)


def test_the_summary_has_rates_and_says_nothing_while_nothing_moves() -> None:
    with serving() as service:
        client, state = service.client(tables={0: SPARSE}), service.servers[0].state
        summary = Summary(state, 0.0)
        assert summary.line(10.0) is None
        client.wait(client.push({0: gradient(range(100))}))
        client.wait(client.pull({0: np.arange(40)}))
        line = summary.line(20.0)
        assert line is not None
        assert line.startswith("100 rows in 1 table, ")
        assert "; 4 rows/s pulled, 10 pushed; 0 gradients wait; the slowest worker is 0 steps behind" in line
        assert summary.line(30.0) is None


def test_a_publishing_server_says_how_far_behind_its_sink_is(tmp_path: Path) -> None:
    sink = MemorySink()
    service = PublishingService(sink, tmp_path)
    try:
        service.push(service.client(), 1, 2)
        found = values(service.servers[0].state)
        assert found["publish_waiting_rows"] == 2
        assert 0 < found["publish_lag_seconds"] < 60  # type: ignore[operator]
        service.publish()
        found = values(service.servers[0].state)
        assert (found["published_deltas"], found["published_rows"], found["published_deletions"]) == (1, 2, 0)
        assert (found["publish_lag_seconds"], found["publish_waiting_rows"], found["publish_failures"]) == (0, 0, 0)
    finally:
        service.close()


def test_memory_is_that_of_this_process() -> None:
    assert 10e6 < resident_bytes() < 1e12
