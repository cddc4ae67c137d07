"""A sink holds what the tables hold, whoever is away, restarted or overtaken meanwhile."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.errors import ConfigError, FleetError, PSError
from fleet.ps.client.shards import Gradient
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.publication import Publication
from fleet.ps.publishing.publisher import Publisher, _Overtaken
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_files import save_tables
from fleet.ps.server.server_process import run_server
from fleet.ps.serving.reader import Reader
from tests.fleet.ps.publishing.rig import PublishingService, publishing
from tests.fleet.ps.service import DENSE, SECRET, gradient, ids, make_table
from tests.helpers.memory_sink import MemorySink


def test_the_first_delta_is_whole_and_later_ones_hold_what_changed(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1, 2)
        service.publish()
        service.push(client, 2, 3)
        service.push(client, 3)
        service.publish()
        service.publish()  # nothing has changed
        assert sink.rows == service.served()
        first, second = sink.deltas
        assert (first.whole, first.previous, second.whole) == (True, 0, False)
        assert second.previous == first.watermark < second.watermark == service.servers[0].state.journal.last_lsn
        assert second.tables[0].keys.tolist() == [2, 3]
        assert second.tables[0].values.tolist() == [[-2, -2], [-2, -2]]
        assert second.step == client.step == 3
        counts = service.servers[0].state.job.published.counts
        assert counts == {"deltas": 2, "rows": 4, "deletions": 0, "failures": 0}


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_a_step_that_ends_after_its_rows_is_published(tmp_path: Path, place: str) -> None:
    """Its last push has dense parameters only; who waits for the step must see it end."""
    sink = MemorySink() if place == "memory" else FolderSink(tmp_path / "rows", "job", "float32")
    with publishing(sink, tmp_path / "state", staleness=4) as service:
        client = service.client()
        rows = np.full((1, 2), 1.0, np.float32)
        client.wait(client.push({0: Gradient(ids(1), rows)}, step=1, ends_step=False))
        service.publish()
        assert step_of(sink, place) == 0
        client.wait(client.push({1: np.ones(DENSE.size, np.float32)}, step=1))
        service.publish()
        assert step_of(sink, place) == 1
        service.publish()
        if isinstance(sink, MemorySink):
            assert [len(delta.tables) for delta in sink.deltas] == [1, 0]
            assert sink.rows == service.served()
        else:
            with Reader(tmp_path / "rows") as reader:
                assert reader.position[0].step == 1
                assert reader.lookup("ads", [1]).tolist() == [[-1.0, -1.0]]


def step_of(sink: Any, place: str) -> int:
    """The step that the sink names."""
    if place == "memory":
        return int(sink.deltas[-1].step)
    return int(sink._read()["servers"]["0"]["step"])


def test_shrunk_and_cleared_rows_are_deleted_from_the_sink(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1, 2, 3)
        service.push(client, 1)
        service.publish()
        client.alter(0, "shrink", threshold=2)
        service.push(client, 2)
        service.publish()
        assert sorted(sink.rows["ads"]) == [1, 2]
        assert sink.deltas[-1].tables[0].deleted.tolist() == [3]
        assert sink.rows == service.served()
        service.restart()
        client.alter(0, "clear")
        service.restart()
        service.publish()
        assert sink.rows == {"ads": {}}
        assert not sink.deltas[-1].whole


def test_a_restarted_server_continues_where_the_sink_stands(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1, 2)
        service.publish()
        service.push(client, 3)
        service.servers[0].snapshot()
        service.push(client, 4)
        service.restart()
        service.publish()
        assert sink.rows == service.served()
        assert (sink.deltas[1].whole, sink.deltas[1].tables[0].keys.tolist()) == (False, [3, 4])


def test_a_lost_answer_and_a_sink_that_is_away_leave_no_hole(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1)
        service.publish()
        for trouble in ("away", "deaf"):
            service.push(client, 2)
            setattr(sink, trouble, True)
            with pytest.raises(OSError, match="sink|answer"):
                service.publish()
            setattr(sink, trouble, False)
            service.push(client, 5)
            lag_s = service.servers[0].state.job.published.lag_s()
            service.publish()
            assert sink.rows == service.served()
            assert lag_s > 0
            assert service.servers[0].state.job.published.lag_s() == 0
        assert [delta.whole for delta in sink.deltas] == [True, False, False, False]


def test_a_sink_that_lost_its_rows_gets_all(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path, 2) as service:
        client = service.client()
        service.push(client, *range(20))
        service.publish()
        old = sink.copy()
        service.push(client, 3, 4)
        service.publish()
        sink.restore(old)
        service.push(client, 5, 6, 7, 8)
        with suppress(PSError):
            service.publish()
        service.publish()
        service.publish()
        assert sink.rows == service.served()
        service.restart()
        sink.restore(({}, {}))
        service.push(client, *range(10))
        for _ in range(3):
            with suppress(PSError):
                service.publish()
        assert sink.rows == service.served()


def test_a_publisher_that_was_overtaken_writes_nothing(tmp_path: Path) -> None:
    """A zombie: the server of the same place that lives on elsewhere."""
    sink = MemorySink()
    with publishing(sink, tmp_path / "a") as old, publishing(sink, tmp_path / "b") as new:
        client = old.client()
        old.push(client, 1, 2)
        old.publish()
        old.push(client, 1)
        other = new.client()
        new.push(other, 1, value=5.0)
        new.publish()
        with pytest.raises(PSError, match="the sink holds"):
            old.publish()
        with pytest.raises(_Overtaken, match="started later; this one publishes no more"):
            old.publish()
        assert sink.rows == new.served()


def test_a_loaded_model_replaces_every_row(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path / "s") as service:
        client = service.client()
        service.push(client, 1, 2)
        server = service.servers[0]
        save_tables(server.state, server.config, {"dirname": str(tmp_path / "save"), "mode": 0, "save_id": "x"})
        service.push(client, 2, 3)
        service.publish()
        changed = sink.rows["ads"][2]
        client.load(str(tmp_path / "save"))
        service.restart()
        service.publish()
        assert sink.rows["ads"][2] != changed
        assert sink.rows == service.served()
        assert sink.deltas[-1].whole


def test_no_delta_is_made_while_rows_are_loaded(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        service.push(service.client(), 1)
        service.publish()
        published = service.servers[0].state.job.published
        published.loading = True
        service.push(service.clients[0], 2)
        assert not service.publishers[0].publish_once()
        assert len(sink.deltas) == 1
        published.loading = False
        service.publish()
        assert sink.rows == service.served()


def test_more_rows_than_may_wait_become_a_whole_delta(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        service.options["most_waiting"] = 50
        service.restart()
        client = service.client()
        service.push(client, 1)
        service.publish()
        for start in range(0, 400, 40):
            service.push(client, *range(start, start + 40))
        assert service.servers[0].state.job.recorder.count(-1) <= 100
        service.publish()
        assert sink.deltas[-1].whole
        assert sink.rows == service.served()


def test_a_history_does_not_survive_a_reboot_at_level_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1)
        service.publish()
        monkeypatch.setattr("fleet.ps.publishing.publisher.boot_id", lambda: "another")
        service.restart()
        service.push(client, 2)
        service.publish()
        assert [delta.whole for delta in sink.deltas] == [True, True]
        assert sink.deltas[0].history < sink.deltas[1].history
        assert sink.rows == service.served()


def test_a_run_that_did_not_publish_ends_the_history(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1)
        service.publish()
        service.servers[0].stop()
        config = service.configs[0]
        plain = Server(config, transport=service.transport, notify=print, make_table=make_table)
        plain.start()
        service.servers[0] = plain
        service.push(client, 2)
        service.restart()
        service.publish()
        assert sink.deltas[-1].whole
        assert sink.rows == service.served()


def test_geo_additions_and_sync_steps_are_published(tmp_path: Path) -> None:
    sink = MemorySink()
    with publishing(sink, tmp_path / "geo") as service:
        client = service.client()
        client.wait(client.add({0: gradient([4], 0.5)}))
        service.publish()
        client.wait(client.add({0: gradient([4, 5], 0.5)}))
        service.publish()
        assert sink.rows == service.served()
        assert sink.deltas[-1].tables[0].keys.tolist() == [4, 5]
    sink = MemorySink()
    with publishing(sink, tmp_path / "sync", mode="sync", num_workers=2) as service:
        clients = [service.client(rank) for rank in range(2)]
        for step in range(3):
            for rank, client in enumerate(clients):
                client.push({0: gradient([rank, 7 + step])})
            for client in clients:
                client.flush()
            service.publish()
            if step == 1:
                service.restart()
        assert sink.rows == service.served()
        assert [delta.step for delta in sink.deltas] == [1, 2, 3]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(-3, 12), min_size=1, max_size=4, unique=True)),
        st.tuples(st.just("shrink"), st.integers(1, 4)),
        st.sampled_from(
            [("publish",), ("away",), ("deaf",), ("snapshot",), ("restart",), ("keep",), ("restore",), ("clear",)]
        ),
    ),
    min_size=3,
    max_size=25,
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(ACTIONS)
def test_whatever_happens_the_sink_ends_with_the_rows_of_the_table(actions: list[tuple[Any, ...]]) -> None:
    folder = Path(tempfile.mkdtemp())
    sink = MemorySink()
    kept = sink.copy()
    try:
        with publishing(sink, folder) as service:
            client = service.client()
            for action, *rest in actions:
                if action == "push":
                    service.push(client, *rest[0])
                elif action == "shrink":
                    client.alter(0, "shrink", threshold=rest[0])
                elif action == "clear":
                    client.alter(0, "clear")
                elif action == "snapshot":
                    service.servers[0].snapshot()
                elif action == "restart":
                    service.restart()
                elif action == "keep":
                    kept = sink.copy()
                elif action == "restore":
                    sink.restore(kept)
                else:
                    sink.away, sink.deaf = action == "away", action == "deaf"
                    taken = len(sink.deltas)
                    with suppress(OSError, PSError):
                        service.publish()
                    sink.away = sink.deaf = False
                    if len(sink.deltas) > taken:
                        assert sink.rows == service.served()
            service.push(client, 1)
            for _ in range(3):
                with suppress(PSError):
                    service.publish()
            assert sink.rows == service.served()
    finally:
        shutil.rmtree(folder)


# -- the thread --------------------------------------------------------------------------------------------------


def server_config(folder: Path, sink: Any, **fields: Any) -> ServerConfig:
    publication = Publication(sink=sink, every_s=fields.pop("every_s", 0.01))
    return ServerConfig(folder=folder, secret=SECRET, publish=publication, **fields)


def test_without_a_journal_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fleet.ps.publish.*FLEET_PS_FOLDER"):
        ServerConfig(publish=Publication(sink="folder:x"))


def test_a_job_ends_when_the_sink_has_the_last_row(tmp_path: Path) -> None:
    service = PublishingService(MemorySink(), tmp_path / "unused")
    service.close()
    sink = MemorySink()
    arrived = threading.Event()
    lines: list[str] = []
    config = server_config(tmp_path / "s", sink, every_s=3600, endpoint="127.0.0.1:9100")

    def notify(line: str) -> None:
        lines.append(line)
        if "listening" in line:
            arrived.set()

    thread = threading.Thread(
        target=run_server, args=(config,), kwargs={"transport": service.transport, "notify": notify}
    )
    thread.start()
    assert arrived.wait(30)
    service.servers = [type("At", (), {"endpoint": "127.0.0.1:9100", "stop": lambda self: None})()]
    client = service.client()
    service.push(client, 1, 2)
    client.goodbye()
    thread.join(30)
    assert not thread.is_alive()
    assert sorted(sink.rows["ads"]) == [1, 2]
    assert not (tmp_path / "s" / "journal").exists()


def test_a_launcher_that_asks_a_server_to_end_waits_for_the_last_rows(tmp_path: Path) -> None:
    """It asks some seconds after the workers are gone; the sink, which is back by then, gets everything."""
    service = PublishingService(MemorySink(), tmp_path / "unused")
    service.close()

    class Asked(MemorySink):
        asked = threading.Event()

        def position(self, server: int) -> tuple[str, int] | None:
            if self.away:
                self.asked.set()
            return super().position(server)

    sink, arrived = Asked(), threading.Event()
    config = server_config(tmp_path / "s", sink, every_s=3600, endpoint="127.0.0.1:9100")

    def work() -> None:
        assert arrived.wait(30)
        service.servers = [type("At", (), {"endpoint": "127.0.0.1:9100", "stop": lambda self: None})()]
        client = service.client()
        sink.away = True
        service.push(client, 1, 2)
        client.goodbye()
        assert sink.asked.wait(30)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)
        time.sleep(0.2)
        sink.away = False

    thread = threading.Thread(target=work)
    thread.start()
    run_server(config, transport=service.transport, notify=lambda line: arrived.set() if "listening" in line else None)
    thread.join(30)
    assert sorted(sink.rows["ads"]) == [1, 2]


def test_a_sink_that_is_away_holds_nobody_and_is_named(tmp_path: Path) -> None:
    sink = MemorySink()
    sink.away = True
    with publishing(sink, tmp_path) as service:
        client = service.client()
        service.push(client, 1)
        assert any("has not taken rows for 0 s: OSError: the sink is away" in line for line in service.lines)
        publisher = service.publishers[0]
        publisher._thread.start()
        while not service.servers[0].state.job.published.counts["failures"]:
            service.push(client, 1)
        with pytest.raises(PSError, match=r"did not take the last 1 rows within 0 s \(OSError.*away.*FLEET_PS_FOLDER"):
            publisher.finish(0.0)
        sink.away = False
        publisher.finish()
        publisher.stop()
        assert any("takes rows again after" in line for line in service.lines)
        assert sink.rows == service.served()


def test_a_publisher_whose_thread_has_ended_has_not_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not look like one that has published everything."""
    monkeypatch.setattr(Publisher, "_note_failure", lambda self, error: sys.exit(3))
    sink = MemorySink()
    with publishing(sink, tmp_path) as service:
        service.push(service.client(), 1)
        sink.away = True
        publisher = service.publishers[0]
        publisher._thread.start()
        with pytest.raises(FleetError, match="'publisher' has ended.*SystemExit: 3"):
            publisher.finish()
        assert any("'publisher' has ended" in line for line in service.lines)


def test_a_sink_that_can_never_take_the_rows_ends_the_server(tmp_path: Path) -> None:
    class Wrong(MemorySink):
        def position(self, server: int) -> tuple[str, int] | None:
            raise ConfigError("holds others")

    server = Server(server_config(tmp_path, Wrong()), make_table=make_table, notify=print)
    with pytest.raises(ConfigError, match="holds others"):
        server.start()
    server.stop()


def test_a_function_gets_a_whole_delta_first(tmp_path: Path) -> None:
    taken: list[Any] = []
    with publishing(taken.append, tmp_path) as service:
        client = service.client()
        service.push(client, 1)
        service.publish()
        service.push(client, 2)
        service.publish()
        service.restart()
        service.push(client, 3)
        service.publish()
        assert [(delta.whole, len(delta.tables[0].keys)) for delta in taken] == [(True, 1), (False, 1), (True, 3)]
        assert isinstance(service.publishers[0], Publisher)
