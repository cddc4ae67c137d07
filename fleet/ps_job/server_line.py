"""tell_server: sends an order of a command outside the job to one of its parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet.env import Environment
from fleet.errors import PSError
from fleet.ps.standby.carried import Carried
from fleet.ps.table.kernels.numba_cache import load_kernels
from fleet.ps.wire.auth import AuthenticationError, prove_to_server
from fleet.ps.wire.messages import Header, Op, control_body, decode_control, decode_header, encode_header
from fleet.ps.wire.transport import SocketTransport
from fleet.ps_job.server_settings import read_worker_tls
from fleet.ps_job.user_secret import read_job_secret

_LIMIT_S = 60.0


def tell_server(server: str, fields: Mapping[str, Any], environment: Environment) -> dict[str, Any]:
    """Sends one FOLLOW message to ``server`` and returns its answer.

    Raises:
        PSError: it is away, proves no knowledge of the secret, or refuses.
    """
    secret = read_job_secret(environment, [server])
    body = control_body(dict(fields))
    # Before the connection: loading takes seconds in a new process, and a server that waited for them would hang up.
    load_kernels("seal")
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
    answered = decode_control(answer)
    if header.step == Carried.REFUSED:
        raise PSError(str(answered.get("error")))
    return answered
