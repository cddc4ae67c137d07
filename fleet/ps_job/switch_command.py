"""``python -m fleet.ps switch SERVER``: a server hands over to its standby while training goes on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from fleet.env import Environment
from fleet.errors import PSError
from fleet.ps.standby.carried import Carried
from fleet.ps.wire.auth import AuthenticationError, check_secret, prove_to_server
from fleet.ps.wire.messages import Header, Op, control_body, decode_control, decode_header, encode_header
from fleet.ps.wire.transport import SocketTransport, stays_here
from fleet.ps_job.server_settings import read_worker_tls
from fleet.ps_job.user_secret import read_user_secret

__all__ = ["run"]

_ABOUT = """Lets the standby of SERVER serve the workers from now on, and makes SERVER its standby: to empty a machine
or go back after a failure. Nothing is lost, and workers wait for less than a second. The servers must have been started
with standbys (launcher: --server_standby), and this command with the FLEET_JOB_SECRET and FLEET_PS_CA of the job."""
_LIMIT_S = 60.0


def run(argv: Sequence[str]) -> int:
    """Switches; returns 0, or 2 for a wrong call.

    Raises:
        PSError: the server is away, has no standby that could take over, or does not serve.
    """
    parser = argparse.ArgumentParser(prog="python -m fleet.ps switch", description=_ABOUT)
    parser.add_argument("server", metavar="SERVER", help="host:port of the server, as the job's lists write it")
    try:
        server: str = parser.parse_args(list(argv)).server
    except SystemExit as stop:
        return int(stop.code or 0)
    began = time.monotonic()
    leads = _switch(server, Environment())
    print(f"{leads} serves now, and {server} is its standby ({time.monotonic() - began:.2f} s)")
    return 0


def _switch(server: str, environment: Environment) -> str:
    """Returns the endpoint that serves now."""
    text = (environment.raw("FLEET_JOB_SECRET") or "").strip().encode()
    secret = read_user_secret(environment) if not text and stays_here(server) else check_secret(server, text)
    body = control_body({"switch": True})
    connection = SocketTransport(client_tls=read_worker_tls(environment)).connect(server, 5.0)
    try:
        line = prove_to_server(connection, server, secret, 5.0)
        line.send(encode_header(Header(Op.FOLLOW, body_bytes=len(body))), [body], 5.0)
        header = decode_header(line.receive_header(5.0, _LIMIT_S))
        answer = memoryview(bytearray(header.body_bytes))
        line.receive_body(answer, 5.0)
    except AuthenticationError as error:
        raise PSError(
            f"{error} A launcher on one node makes a secret of its own unless FLEET_JOB_SECRET is set."
        ) from None
    finally:
        connection.close()
    fields = decode_control(answer)
    if header.step == Carried.REFUSED:
        raise PSError(str(fields.get("error")))
    return str(fields["leads"])
