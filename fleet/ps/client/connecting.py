"""Waiting for parameter servers that have not started yet."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from fleet.errors import PSError
from fleet.ps.wire.transport import Connection, ConnectionLost, TransferTimeout, Transport

_POLL_S = 0.2
_GREETING_S = 0.05
_SILENT_ENDS = 2
_CONNECT_S = 1.0


def wait_for_servers(
    endpoints: Sequence[str],
    transport: Transport,
    *,
    notify: Callable[[str], None] = print,
    timeout_s: float | None = None,
    interval_s: float = 3.0,
    others: Sequence[Sequence[str]] = (),
) -> None:
    """Waits until every server greets, at its endpoint or one of its ``others``; reports every ``interval_s`` seconds
    where none does.

    Raises:
        PSError: some were missing after ``timeout_s``; the message names them.
    """
    began = time.monotonic()
    said = began - interval_s
    explained = False
    with ExitStack() as stack:
        groups = [
            [_Probe(each, transport) for each in (endpoint, *(others[index] if others else ()))]
            for index, endpoint in enumerate(endpoints)
        ]
        for probe in itertools.chain(*groups):
            stack.callback(probe.close)
        while True:
            groups = [group for group in groups if not any([probe.answers() for probe in group])]
            absent = [group[0].endpoint for group in groups]
            if not absent:
                return
            now = time.monotonic()
            if timeout_s is not None and now - began > timeout_s:
                raise PSError(
                    f"parameter servers {absent} did not come within {timeout_s} s. Look at their logs, or raise the "
                    "timeout."
                )
            if now - said >= interval_s:
                said = now
                notify(f"server not ready, wait {interval_s:g} sec to retry...")
                notify(f"not ready endpoints:{absent}")
                if now - began >= interval_s and not explained:
                    explained = True
                    notify(_explanation(absent, timeout_s))
            time.sleep(_POLL_S)


def _explanation(absent: Sequence[str], timeout_s: float | None) -> str:
    limit = "" if timeout_s is None else f" This worker waits {timeout_s:g} s (FLAGS_stop_check_timeout)."
    return (
        f"nobody listens on {', '.join(absent)}: that parameter server has not come to fleet.run_server() yet, has "
        f"ended (its log says why), or PADDLE_PSERVERS_IP_PORT_LIST is wrong here.{limit}"
    )


class _Probe:
    """Watches one endpoint. Accepted connections prove nothing, because the launcher holds the port of a server.

    A connection without a greeting is kept: a server that starts later greets it first.
    """

    def __init__(self, endpoint: str, transport: Transport) -> None:
        self.endpoint = endpoint
        self._transport = transport
        self._connection: Connection | None = None
        self._silent_ends = 0

    def answers(self) -> bool:
        """Returns whether a server has greeted, or has hung up twice because it expects TLS (connecting reports it)."""
        try:
            if self._connection is None:
                self._connection = self._transport.connect(self.endpoint, _CONNECT_S)
            self._connection.receive(memoryview(bytearray(1)), _GREETING_S, _GREETING_S)
        except TransferTimeout:
            return False
        except ConnectionLost:
            self._silent_ends += self._connection is not None
            self.close()
            return self._silent_ends == _SILENT_ENDS
        self.close()
        return True

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
