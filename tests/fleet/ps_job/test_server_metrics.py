"""Metrics of servers and workers on request, as Prometheus reads them (FLEET_PS_METRICS_PORT, extra ``metrics``)."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import fleet
from fleet.env import Environment
from fleet.errors import ConfigError, PSError, UnsupportedOptionError
from fleet.facade import Fleet
from fleet.launch.page.page_folder import PageFolder, ServerRecord
from fleet.ps.server.measures import Measure
from fleet.ps.server.server_process import run_server
from fleet.ps.server.server_state import ServerState
from fleet.ps_job.server_metrics import Metrics, address_towards, serve_measures, write_server_page
from tests.fleet.ps.service import Service, silent, until
from tests.fleet.ps.standby.test_pair import FIRST, Duo, push_and_flush
from tests.fleet.ps_job.test_server_job import make_sgd, served, strategy
from tests.helpers.crowd import Crowd
from tests.helpers.served import batches, run_job, train

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_range(count: int) -> int:
    """The first of ``count`` ports that are free side by side."""
    for first in range(20000, 30000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def scraped(port: int) -> Samples:
    """What a Prometheus server would store of one process."""
    with DIRECT.open(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_servers_and_workers_serve_what_they_know(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue, section 2: rows, memory, queue lengths, staleness and rows per second, of every process."""
    first = free_range(3)
    monkeypatch.setenv("FLEET_PS_METRICS_PORT", str(first))
    found: list[Samples] = []

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy(mode), make_sgd)
        train(model, optimizer, batches(4))
        own.session.server_job.running().connection.flush()
        found.extend(scraped(first + place) for place in range(3))
        own.stop_worker()

    run_job(work, num_servers=2, strategy=strategy(mode))
    worker, servers = found[2], found[:2]
    labels = (("table", "ads"), ("worker", "0"))
    assert worker["fleet_ps_steps_total", (("worker", "0"),)] == 4
    assert worker["fleet_ps_pulled_rows_total", (("worker", "0"),)] > 40
    assert worker["fleet_ps_pushed_rows_total", (("worker", "0"),)] > 40
    assert worker["fleet_ps_waiting_gradients", labels] == 0
    assert worker["fleet_ps_staleness_steps", (("worker", "0"),)] == 0
    ids = len({int(key) for ads, _, _ in batches(4) for key in ads.flatten()})
    rows = [server["fleet_ps_table_rows", (("server", str(i)), ("table", "ads"))] for i, server in enumerate(servers)]
    assert sum(rows) == ids
    for index, server in enumerate(servers):
        own = (("server", str(index)),)
        assert server["fleet_ps_memory_bytes", own] > 10e6
        assert server["fleet_ps_pulled_rows_total", own] > 0
        assert server["fleet_ps_pushed_rows_total", own] > 0
        assert server["fleet_ps_staleness_steps", own] == 0
        assert server["fleet_ps_waiting_gradients", own] == 0
        assert server["fleet_ps_worker_steps", (*own, ("worker", "0"))] == 4
        assert server["fleet_ps_workers", (*own, ("state", "active"))] == 1
    for place in range(3):
        with pytest.raises(urllib.error.URLError):
            scraped(first + place)


def test_a_worker_says_how_many_events_of_a_stream_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_range(2)
    monkeypatch.setenv("FLEET_PS_METRICS_PORT", str(first))
    found: list[Samples] = []
    events = batches(9)

    class Events:
        def __call__(self, partition: int, start: int) -> Iterator[tuple[int, Any]]:
            return ((offset, events[offset]) for offset in range(start, 9))

        def end(self, partition: int) -> int:
            return 9 + partition

    def work(own: Fleet, rank: int) -> None:
        monkeypatch.setattr("fleet.dataset.stream.running_session", lambda: own.session)
        model, optimizer = served(own, strategy("async"), make_sgd)
        dataset = fleet.StreamDataset(
            Events(), lambda event: event, batch_size=1, collate=lambda samples: samples[0], name="a", partitions=2
        )
        stream = iter(dataset)
        train(model, optimizer, [next(stream) for _ in range(4)])
        own.session.server_job.running().connection.flush()
        found.extend(scraped(first + place) for place in range(2))
        dataset.close()
        found.append(scraped(first + 1))
        own.stop_worker()

    run_job(work, strategy=strategy("async"))
    server, worker, closed = found
    place = (("partition", "0"), ("source", "a"))
    assert (
        server["fleet_ps_stream_next_offset", (place[0], ("server", "0"), place[1])] == 2
    )  # of 4 events; partitions take turns
    assert server["fleet_ps_stream_age_seconds", (place[0], ("server", "0"), place[1])] < 60
    assert worker["fleet_ps_stream_lag_events", (*place, ("worker", "0"))] == 7
    assert not any("lag" in name for name, _ in closed)


def metrics_of(**values: str) -> Metrics:
    return Metrics(Environment(values), 2, 3, lambda line: None)


@pytest.mark.parametrize("value", ["0", "-1", "65532", "70000", "9100,9101", "on"])
def test_a_wrong_port_is_refused(value: str) -> None:
    rule = "first of 5 ports.* at most 65531" if value.lstrip("-").isdigit() else "takes an integer"
    with pytest.raises(ConfigError, match=f"FLEET_PS_METRICS_PORT is '{value}' in the environment; .*{rule}"):
        metrics_of(FLEET_PS_METRICS_PORT=value)
    metrics_of(FLEET_PS_METRICS_PORT="65531")


def test_without_the_extra_the_error_has_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a job that asks for no metrics needs no extra."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics_of()
    with pytest.raises(UnsupportedOptionError, match=r"pip install '\.\[metrics\]'"):
        metrics_of(FLEET_PS_METRICS_PORT="9100")


def test_a_taken_port_is_named_and_the_worker_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_range(2)
    monkeypatch.setenv("FLEET_PS_METRICS_PORT", str(first))
    own = Fleet()
    own.init(strategy=strategy("sync"), log_level="WARNING")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        with pytest.raises(PSError, match=f"cannot be served on 127.0.0.1:{first}: .* range of free ports"):
            served(own, strategy("sync"), make_sgd)
    assert own.session.server_job.trainer is None
    own.session.close()


@contextmanager
def watched_duo(folder: Path, first: int, watched: Sequence[int]) -> Iterator[tuple[Duo, list[Future[None]]]]:
    """Yields a server and its standby, each as its process runs it; those ``watched`` have one port for metrics."""
    pair = Duo(folder)
    metrics = Metrics(Environment({"FLEET_PS_METRICS_PORT": str(first)}), 1, 1, pair.lines.append)

    def run(place: int) -> None:
        def watch(state: ServerState, is_new: bool) -> Callable[[], None]:
            return metrics.serve_server(state, 0, FIRST, waits=not is_new) if place in watched else lambda: None

        run_server(pair.configs[place], transport=pair.transport, notify=pair.lines.append, watch=watch)

    running = [in_background(partial(run, place)) for place in (0, 1)]
    try:
        until(lambda: said(pair, "has a snapshot and follows") == 1)
        yield pair, running
    finally:
        pair.close()


def in_background(call: Callable[[], None]) -> Future[None]:
    """What ``call`` comes to; a test that fails does not wait for it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def said(pair: Duo, part: str) -> int:
    """How often one of the two has said it."""
    return sum(part in line for line in pair.lines)


def test_a_server_that_hands_over_gives_its_port_to_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one that took over ended because the port was taken, and the rows with it."""
    first = free_range(2)
    with watched_duo(tmp_path, first, [0, 1]) as (pair, running):
        client = pair.client()
        for turn in range(2):
            push_and_flush(client)
            assert pair.switch(turn) == {"leads": pair.configs[1 - turn].endpoint}
            push_and_flush(client)
            until(lambda turn=turn: said(pair, "metrics of this process are at") == 2 + turn)  # type: ignore[misc]
            assert scraped(first)["fleet_ps_table_rows", (("server", "0"), ("table", "ads"))] == 1
            until(lambda turn=turn: said(pair, "has a snapshot and follows") == 2 + turn)  # type: ignore[misc]
        client.goodbye()
        for future in running:
            future.result(20)
    assert not caplog.records
    with pytest.raises(urllib.error.URLError):
        scraped(first)


@pytest.mark.parametrize("is_freed", [True, False])
def test_a_server_that_takes_over_serves_rows_while_its_port_is_taken(
    tmp_path: Path, is_freed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fleet.ps_job.server_metrics._WARN_AFTER_S", 0.3)
    first = free_range(2)
    with socket.create_server(("127.0.0.1", first)) as taken, watched_duo(tmp_path, first, [1]) as (pair, running):
        client = pair.client()
        pair.switch(0)
        push_and_flush(client)
        until(lambda: bool(caplog.records))
        time.sleep(0.5)  # another try or two
        if is_freed:
            taken.close()
            until(lambda: said(pair, "metrics of this process are at") == 1)
            assert scraped(first)
        client.goodbye()
        for future in running:
            future.result(20)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"cannot be served on 127.0.0.1:{first}: [Errno 98]" in record.message
    assert "metrics as soon as the port is free" in record.message
    assert not any(thread.name.startswith("fleet-metrics") for thread in threading.enumerate())


def test_a_taken_port_ends_a_server_at_the_start_of_a_job_only(tmp_path: Path) -> None:
    """One that is started again goes on from its folder."""
    first = free_range(2)
    metrics = Metrics(Environment({"FLEET_PS_METRICS_PORT": str(first)}), 1, 1, lambda line: None)
    with socket.create_server(("127.0.0.1", first)):
        service = Service(1, level=1, folder=tmp_path)
        config, transport = service.configs[0], service.transport

        def run() -> None:
            run_server(
                config,
                transport=transport,
                notify=silent,
                watch=lambda state, is_new: metrics.serve_server(state, 0, FIRST, waits=not is_new),
            )

        with pytest.raises(PSError, match=f"cannot be served on 127.0.0.1:{first}: .* range of free ports"):
            run()
        service.start(0)
        client = service.client()
        push_and_flush(client)
        service.servers[0].stop()
        running = in_background(run)
        push_and_flush(client)
        client.goodbye()
        running.result(20)
        service.close()


def test_a_worker_serves_on_its_address_towards_the_servers() -> None:
    assert address_towards("127.0.0.1:1") == "127.0.0.1"
    assert address_towards("[::1]:1") in ("::1", "127.0.0.1")  # without IPv6 there is no way
    assert address_towards("nobody.invalid:1") == "127.0.0.1"


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PSError, match="metrics cannot be served on 192.0.2.1:9100"):
        serve_measures(list, {}, "192.0.2.1", 9100)


@pytest.fixture
def served_port() -> Iterator[int]:
    first = free_range(1)
    stop = serve_measures(lambda: [Measure("rows", "rows", 7.0)], {"server": "0"}, "127.0.0.1", first)
    yield first
    stop()


def test_idle_and_slow_strangers_take_neither_threads_nor_the_port(served_port: int) -> None:
    """Issue 10, Medium 5: each held a thread and a descriptor for as long as it liked."""
    num_threads, num_files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", served_port), timeout=5)).sendall(b"GET /me")
        assert scraped(served_port) == {("fleet_ps_rows", (("server", "0"),)): 7.0}
        assert threading.active_count() == num_threads
        assert len(os.listdir("/proc/self/fd")) < num_files + 200 + 100, "the port's ends of 32 connections, not of 200"


def test_a_scrape_is_answered_while_strangers_return(served_port: int) -> None:
    with Crowd(("127.0.0.1", served_port), 100):
        for _ in range(10):
            assert scraped(served_port)


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET / HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0\r\n\r\n", b"# EOF"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"POST / HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"\xff\x00\r\n\r\n", b"405 Method Not Allowed"),
        (b"x" * 20_000, b""),
    ],
)
def test_what_the_port_answers(served_port: int, request_text: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served_port), timeout=5) as sock:
        sock.sendall(request_text)
        answer = b""
        with suppress(ConnectionError):
            while block := sock.recv(65536):
                answer += block
    assert status in answer
    assert bool(answer) == bool(status)


def test_a_failed_reading_ends_one_answer() -> None:
    first, broken = free_range(1), [True]

    def read() -> list[Measure]:
        if broken:
            broken.clear()
            raise PSError("not now")
        return [Measure("rows", "rows", 7.0)]

    stop = serve_measures(read, {}, "127.0.0.1", first)
    try:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            scraped(first)
        assert scraped(first)
    finally:
        stop()


def test_the_server_says_how_it_fares() -> None:
    """Issue, section 2: the same in the log, while rows move."""
    from tests.fleet.ps.service import DENSE, SPARSE, gradient, serving

    lines: list[str] = []
    with serving(summary_interval_s=0.05, lease_s=0.2) as service:
        service.servers[0]._notify = lines.append  # type: ignore[method-assign]
        client = service.client(tables={0: SPARSE, 1: DENSE})
        told = 0
        for _ in range(600):
            client.wait(client.push({0: gradient([1, 2])}))
            told = sum("rows/s pulled" in line for line in lines)
            if told > 1:
                break
            _wait()
    assert told > 1
    line = next(line for line in lines if "rows/s" in line)
    assert "2 rows in 1 table," in line  # of ids: a dense table has elements
    assert "0 gradients wait; the slowest worker is 0 steps behind" in line


def _wait(seconds: float = 0.02) -> Any:
    import time

    time.sleep(seconds)


def test_each_server_shows_its_tables_while_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_PAGE_FOLDER", str(tmp_path))
    monkeypatch.setattr("fleet.ps_job.server_metrics._PAGE_PERIOD_S", 0.02)
    found: list[dict[int, list[ServerRecord]]] = []

    def work(own: Fleet, rank: int) -> None:
        model, optimizer = served(own, strategy("async"), make_sgd)
        train(model, optimizer, batches(4))
        own.session.server_job.running().connection.flush()
        folder = PageFolder(tmp_path)
        for _ in range(500):
            servers = folder.servers()
            if len(servers) == 2 and all(r.totals["changes"] and r.tables for (r,) in servers.values()):
                found.append(servers)
                break
        own.stop_worker()

    run_job(work, num_servers=2, strategy=strategy("async"))
    rows = [sum(t.get("table_rows", 0) for t in record.tables.values()) for (record,) in found[0].values()]
    assert all(rows)
    assert {"memory_bytes", "pulled_rows_per_s", "pushed_rows_per_s"} <= set(found[0][0][0].totals)
    assert list(tmp_path.glob("server.*")) == [], "nobody serves any more"


def test_without_a_page_nothing_is_written(tmp_path: Path) -> None:
    state: Any = None  # it is not looked at
    write_server_page(state, 0, Environment({}))()
