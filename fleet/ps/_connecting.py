"""Waiting for servers that are not there yet, with the lines Fleet prints meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fleet.errors import PSError
from fleet.ps._transport import ConnectionLost, Transport

__all__ = ["wait_for_servers"]

_POLL_S = 0.2


def wait_for_servers(
    endpoints: Sequence[str],
    transport: Transport,
    *,
    notify: Callable[[str], None] = print,
    timeout_s: float | None = None,
    interval_s: float = 3.0,
    connect_timeout_s: float = 1.0,
) -> None:
    """Returns once every endpoint takes connections; says every ``interval_s`` seconds which do not.

    Raises:
        PSError: some were not there within ``timeout_s``; the message names them.
    """
    began = time.monotonic()
    absent = list(endpoints)
    said, explained = began - interval_s, False
    while True:
        absent = [endpoint for endpoint in absent if not _answers(endpoint, transport, connect_timeout_s)]
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
                limit = "" if timeout_s is None else f" This worker waits {timeout_s:g} s (FLAGS_stop_check_timeout)."
                notify(
                    f"nobody listens on {', '.join(absent)}: that parameter server has not come to fleet.run_server() "
                    f"yet, has ended (its log says why), or PADDLE_PSERVERS_IP_PORT_LIST is wrong here.{limit}"
                )
        time.sleep(_POLL_S)


def _answers(endpoint: str, transport: Transport, timeout_s: float) -> bool:
    try:
        transport.connect(endpoint, timeout_s).close()
    except ConnectionLost:
        return False
    return True
