"""The process of a parameter server: serves until the workers are gone, or a signal ends it."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from fleet.common.own_thread import OwnThread
from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.wire.transport import Transport

Prepare = Callable[[ServerState], None]
Watch = Callable[[ServerState, bool], Callable[[], None]]


def run_server(
    config: ServerConfig,
    *,
    transport: Transport | None = None,
    notify: Callable[[str], None] = print,
    prepare: Prepare | None = None,
    watch: Watch = lambda state, is_new: lambda: None,
) -> None:
    """Serves until the workers are gone, then removes the state in the folder: the job is over.

    SIGTERM and Ctrl-C (in the main thread) end it and keep the state; it exits with 143 or 130. While a sink takes the
    last rows of the job, for 30 seconds at most, only Ctrl-C or a second SIGTERM does.

    Args:
        config: the server.
        transport: how connections are made; TCP by default.
        notify: receives each log line; one says on which endpoint the server is listening.
        prepare: see :meth:`fleet.ps.server.server.Server.start`.
        watch: is given the state once the server serves workers, and whether the job begins with it (False: it took
            over, or goes on from its folder); its result is called at the end.

    Raises:
        ConfigError: no secret, or numba is broken or disabled.
        CheckpointError: the folder holds damaged state, or that of another job.
        PSError: the endpoint is taken, or the server could not continue.
    """
    run_servers([(config, prepare)], transport=transport, notify=notify, watch=watch)


def run_servers(
    parts: Sequence[tuple[ServerConfig, Prepare | None]],
    *,
    transport: Transport | None = None,
    notify: Callable[[str], None] = print,
    watch: Watch = lambda state, is_new: lambda: None,
) -> None:
    """Serves several shards in this process, as :func:`run_server` serves one; the first that fails ends all.

    Args:
        parts: each shard's config, and what prepares it.
        transport, notify, watch: as for :func:`run_server`.
    """
    servers = [Server(config, transport=transport, notify=notify) for config, _ in parts]
    with _exit_on_signals(servers), ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        for server, (_, prepare) in zip(servers, parts, strict=True):
            server.start(prepare)
        if len(servers) == 1:
            _serve(servers[0], watch)
        else:
            _serve_all(servers, watch)
    for server in servers:
        server.forget()


def _serve(server: Server, watch: Watch) -> None:
    """Serves until the job is over."""
    while server.wait_for_turn():
        with ExitStack() as turn:
            turn.callback(watch(server.state, server.is_new))
            server.wait()
        if server.still_leads():
            server.finish_publishing()
            server.end_standby()
            break


def _serve_all(servers: Sequence[Server], watch: Watch) -> None:
    ended: queue.SimpleQueue[OwnThread] = queue.SimpleQueue()

    def serve(server: Server) -> None:
        try:
            _serve(server, watch)
        finally:
            ended.put(threads[server])

    threads = {server: OwnThread(serve, server, name="shard", say=None) for server in servers}
    for thread in threads.values():
        thread.start()
    for _ in servers:
        ended.get().result()


@contextmanager
def _exit_on_signals(servers: Sequence[Server]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nobody else handles Ctrl-C
        numbers.append(signal.SIGINT)
    is_asked = False

    def leave(number: int, _: object) -> None:
        nonlocal is_asked
        # Launchers ask at the end of a job, when a sink may lack rows that nobody trains again.
        goes_on = number == signal.SIGTERM and not is_asked and any(server.is_finishing for server in servers)
        is_asked = True
        if not goes_on:
            sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
