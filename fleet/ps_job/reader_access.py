"""read_access: the secret and the transport with which a process outside a job reads rows from its servers."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.env import Environment
from fleet.ps.serving.read_line import ReadAccess
from fleet.ps.wire.auth import check_secret
from fleet.ps.wire.transport import SocketTransport, stays_here
from fleet.ps_job.server_settings import read_worker_tls
from fleet.ps_job.user_secret import read_user_secret


def read_access(endpoints: Sequence[str], job: str | None, wire: str) -> ReadAccess:
    """Returns what a ``fleet.ps.Reader`` of servers needs, by FLEET_JOB_SECRET and FLEET_PS_CA.

    Without a secret in the environment it is this user's, as for workers, where all servers are on this machine.

    Raises:
        ConfigError: there is no secret, or it cannot be read.
    """
    environment = Environment()
    text = (environment.raw("FLEET_JOB_SECRET") or "").strip().encode()
    if not text and all(map(stays_here, endpoints)):
        secret = read_user_secret(environment)
    else:
        secret = check_secret(next((one for one in endpoints if not stays_here(one)), endpoints[0]), text)
    return ReadAccess(secret, SocketTransport(client_tls=read_worker_tls(environment)), job, wire)
