"""FLEET_PS_METRICS_PORT: metrics of servers and workers, as Prometheus reads them; needs the extra ``metrics``.

Server i takes port + i, worker r takes port + number of servers + r, so that a job on one machine needs no list. A
server and its standby share a port, and the serving process answers there. Names begin with ``fleet_ps_``. Counters
only grow: ``rate(fleet_ps_pushed_rows_total[1m])`` are the rows per second.

The measures of servers also go to the page of the job, as a file a second (see ``fleet/trackers/page_trackers.py``).
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from email.parser import Parser
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.common.extras import install_line
from fleet.common.log import LOGGER
from fleet.common.own_thread import OwnThread
from fleet.env import Environment
from fleet.errors import ConfigError, PSError, UnsupportedOptionError
from fleet.launch.membership.callers import Answerer, listen
from fleet.ps.server.measures import Measure, Rates, server_measures, worker_measures
from fleet.trackers.page_trackers import write_record

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from fleet.ps.server.server_state import ServerState
    from fleet.ps.worker.connection import WorkerConnection

_HIGHEST = 65535
# Anybody who reaches the port may ask: who says nothing makes room, and nobody stays for long.
_MOST_CALLERS = 32
_SCRAPE_S = 10.0
_LONGEST_REQUEST = 16384
# A server that hands over gives its port back within two seconds.
_RETRY_S = 0.2
_WARN_AFTER_S = 5.0
_PAGE_PERIOD_S = 1.0
_PAGE_RATES = {
    "pulled_rows_per_s": "pulled",
    "pushed_rows_per_s": "rows",
    "pulled_elements_per_s": "pulled_elements",
    "pushed_elements_per_s": "elements",
}
_page_numbers = count()  # a process may serve several shards
Stop = Callable[[], None]


class Metrics:
    """Where the processes of a job serve metrics, if they do.

    Args:
        environment: says whether, and from which port on.
        num_servers, num_workers: how many ports the job takes.
        say: receives the line that says where.

    Raises:
        ConfigError: the ports do not fit between 1 and 65535.
        UnsupportedOptionError: metrics are asked for and the extra is absent.
    """

    def __init__(
        self, environment: Environment, num_servers: int, num_workers: int, say: Callable[[str], None]
    ) -> None:
        self._first: int | None = None
        self._num_servers = num_servers
        self._say = say
        self._environment = environment
        if not environment.has("FLEET_PS_METRICS_PORT"):
            return
        first = environment.int("FLEET_PS_METRICS_PORT")
        ports = num_servers + num_workers
        if not 1 <= first <= _HIGHEST + 1 - ports:
            raise ConfigError(
                f"FLEET_PS_METRICS_PORT is {environment.raw('FLEET_PS_METRICS_PORT')!r} in the environment; it is the "
                f"first of {ports} ports, one for each server and worker, from 1 to {_HIGHEST}. Set it to at most "
                f"{_HIGHEST + 1 - ports}, or omit it."
            )
        check_installed()
        self._first = first

    def serve_server(self, machine: ServerState, index: int, endpoint: str, *, waits: bool = False) -> Stop:
        """Serves the metrics of server ``index`` beside its ``endpoint``, and shows them on the page of the job.

        Args:
            waits: a port in use is no error; metrics are served as soon as it is free. The rows of a server that takes
                over are worth more, and the server before it may still have the port.

        Returns:
            A function that ends both.
        """
        host = endpoint.rpartition(":")[0].strip("[]")
        stop = self._serve(lambda: server_measures(machine), {"server": str(index)}, host, index, waits=waits)
        end_page = write_server_page(machine, index, self._environment)

        def end() -> None:
            stop()
            end_page()

        return end

    def serve_worker(self, connection: WorkerConnection, rank: int, endpoints: Sequence[str]) -> Stop:
        """Serves the metrics of worker ``rank`` on its address towards the servers; returns a function that ends it."""
        if self._first is None:
            return lambda: None
        host = address_towards(endpoints[0])
        return self._serve(lambda: worker_measures(connection), {"worker": str(rank)}, host, self._num_servers + rank)

    def _serve(
        self, read: Callable[[], list[Measure]], labels: dict[str, str], host: str, place: int, *, waits: bool = False
    ) -> Stop:
        if self._first is None:
            return lambda: None
        port = self._first + place
        line = f"metrics of this process are at {host}:{port}/metrics"
        if waits:
            return _serve_when_free(lambda: _open(read, labels, host, port), f"{host}:{port}", lambda: self._say(line))
        stop = serve_measures(read, labels, host, port)
        self._say(line)
        return stop


def address_towards(endpoint: str) -> str:
    """Returns this machine's address on the way to ``endpoint``: the loopback one for a server on this machine.

    Example:
        >>> address_towards("127.0.0.1:4000")
        '127.0.0.1'
    """
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    with suppress(OSError, ValueError):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent: connect() only chooses the way
            probe.connect((host, int(port)))
            address = str(probe.getsockname()[0])
            ipaddress.ip_address(address)
            return address
    return "127.0.0.1"


def check_installed() -> None:
    """Raises UnsupportedOptionError with the line that installs the extra, when it is absent."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise UnsupportedOptionError(
            f"FLEET_PS_METRICS_PORT is set, and metrics need the extra metrics ({error}); "
            f"{install_line('metrics')}, or unset FLEET_PS_METRICS_PORT."
        ) from None


def serve_measures(read: Callable[[], list[Measure]], labels: Mapping[str, str], host: str, port: int) -> Stop:
    """Serves ``read()`` at ``/metrics`` on ``host:port`` from now on; returns a function that ends it.

    Raises:
        UnsupportedOptionError: the extra is absent.
        PSError: the port is taken, or the address is not this machine's.
    """
    check_installed()
    try:
        return _open(read, labels, host, port)
    except OSError as error:
        raise PSError(
            f"metrics cannot be served on {host}:{port}: {error}. Set FLEET_PS_METRICS_PORT to the first of a range of "
            "free ports: server i takes the i-th of it, and worker r the r-th after the servers'."
        ) from None


def _serve_when_free(open_port: Callable[[], Stop], address: str, say: Callable[[], None]) -> Stop:
    """Opens the port now, or from a thread as soon as ``open_port`` raises no OSError; returns a function that ends it.

    ``say`` is called once the port is open. A port that stays in use is named in a warning, once.
    """
    ended = threading.Event()
    stops = list[Stop]()
    began = time.monotonic()
    warned = False

    def is_open(waited_s: float) -> bool:
        nonlocal warned
        try:
            stops.append(open_port())
        except OSError as error:
            if waited_s > _WARN_AFTER_S and not warned:
                warned = True
                LOGGER.warning(
                    f"metrics cannot be served on {address}: {error}. This server took over, or was started again: it "
                    "serves its rows meanwhile, and metrics as soon as the port is free. End the process that has it."
                )
            return False
        say()
        return True

    def wait() -> None:
        while not ended.wait(_RETRY_S) and not is_open(time.monotonic() - began):
            pass

    if is_open(0.0):
        return stops[0]
    thread = OwnThread(wait, name="fleet-metrics port")
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()
        for stop in stops:
            stop()

    return end


def _open(read: Callable[[], list[Measure]], labels: Mapping[str, str], host: str, port: int) -> Stop:
    """Serves ``read()`` from now on; raises OSError where the port cannot be had."""
    from prometheus_client import CollectorRegistry

    # Not the global registry, in which the script may have metrics, and this process other servers.
    registry = CollectorRegistry()
    registry.register(_Collector(read, labels))
    return Answerer(
        listen(host, port),
        lambda request: _answer(request, registry),
        most=_MOST_CALLERS,
        limit_s=_SCRAPE_S,
        longest=_LONGEST_REQUEST,
        name="fleet-metrics",
    ).close


def _answer(request: bytes, registry: CollectorRegistry) -> bytes | None:
    """Returns the answer of HTTP to ``request``, None while its head is not whole."""
    from prometheus_client.exposition import choose_encoder

    head, end, _ = request.partition(b"\r\n\r\n")
    if not end:
        return None
    line, _, fields = head.partition(b"\r\n")
    if not line.startswith(b"GET "):
        return _http("405 Method Not Allowed", "text/plain", b"")
    try:
        accepted = Parser().parsestr(fields.decode("latin-1"), headersonly=True).get("Accept", "")
        encode, kind = choose_encoder(accepted)
        return _http("200 OK", kind, encode(registry))
    except Exception as error:  # noqa: BLE001 - one answer fails, the next may not
        return _http("500 Internal Server Error", "text/plain", f"{error}\n".encode())


def _http(status: str, kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


class _Collector:
    """The collector of measures that prometheus_client asks at each request."""

    def __init__(self, read: Callable[[], list[Measure]], labels: Mapping[str, str]) -> None:
        self._read = read
        self._labels = dict(labels)

    def describe(self) -> list[Any]:
        """Returns nothing: the measures are read only when somebody asks for them."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yields a metric of each measure."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        names = list(self._labels)
        values = list(self._labels.values())
        for measure in self._read():
            family = CounterMetricFamily if measure.grows else GaugeMetricFamily
            metric = family(f"fleet_ps_{measure.name}", measure.meaning, labels=[*names, *_several(measure.label)])
            if measure.label:
                for label, value in measure.samples.items():
                    metric.add_metric([*values, *_several(label)], value)
            else:
                metric.add_metric(values, measure.value)
            yield metric


def _several(label: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(label, tuple):
        return label
    return (label,) if label else ()


# -- the page of the job -----------------------------------------------------------------------------------------------


def write_server_page(state: ServerState, index: int, environment: Environment) -> Callable[[], None]:
    """Writes the measures of server ``index`` once a second where the job has a page.

    Returns:
        A function that ends that and removes the file: another process may serve these rows next.
    """
    folder = environment.raw("FLEET_PAGE_FOLDER")
    if folder is None:
        return lambda: None
    path = Path(folder) / f"server.{index}.{next(_page_numbers)}.json"
    ended = threading.Event()

    def write() -> None:
        rates = Rates(state, time.monotonic())
        while True:
            with suppress(OSError):  # a full disk ends no server
                record = _page_record(state)
                now = rates.since_last(time.monotonic())
                record["totals"].update({name: now[count] for name, count in _PAGE_RATES.items()})
                write_record(path, record)
            if ended.wait(_PAGE_PERIOD_S):
                return

    thread = OwnThread(write, name="fleet-page")
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()
        with suppress(OSError):
            path.unlink()

    return end


def _page_record(state: ServerState) -> dict[str, dict[str, Any]]:
    """Returns the measures that the page shows: values by table, and values of the whole server."""
    tables: dict[str, dict[str, float]] = {}
    totals: dict[str, float] = {}
    for measure in server_measures(state):
        if measure.label == "table":
            for table, value in measure.samples.items():
                tables.setdefault(str(table), {})[measure.name] = value
        elif not measure.label:
            totals[measure.name] = measure.value
        elif measure.name.startswith("stream_"):
            totals[measure.name] = max(measure.samples.values(), default=0.0)
    return {"tables": tables, "totals": totals}
