"""The process of a parameter server: serves until the workers are gone, or a signal ends it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from fleet.ps.server.server import Server
from fleet.ps.server.server_config import ServerConfig
from fleet.ps.server.server_state import ServerState
from fleet.ps.wire.transport import Transport

__all__ = ["run_server"]


def run_server(
    config: ServerConfig,
    *,
    transport: Transport | None = None,
    notify: Callable[[str], None] = print,
    prepare: Callable[[ServerState], None] | None = None,
    watch: Callable[[ServerState], Callable[[], None]] = lambda state: lambda: None,
) -> None:
    """Serves until the workers are gone, then removes the state in the folder: the job is over.

    SIGTERM and Ctrl-C (in the main thread) end it and keep the state; it exits with 143 or 130.

    Args:
        config: the server.
        transport: how connections are made; TCP by default.
        notify: receives each log line; one says on which endpoint the server is listening.
        prepare: see :meth:`fleet.ps.server.server.Server.start`.
        watch: is given the state once the server listens; what it returns is called at the end.

    Raises:
        ConfigError: no secret, or numba is broken or disabled.
        CheckpointError: the folder holds damaged state, or that of another job.
        PSError: the endpoint is taken, or the server could not continue.
    """
    server = Server(config, transport=transport, notify=notify)
    with _exit_on_signals(), ExitStack() as stack:
        stack.callback(server.stop)
        server.start(prepare)
        while server.wait_for_turn():
            with ExitStack() as turn:
                turn.callback(watch(server.state))
                server.wait()
            if server.still_leads():
                server.finish_publishing()
                server.end_standby()
                break
    server.forget()


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nobody else handles Ctrl-C
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, lambda got, _: sys.exit(128 + got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
