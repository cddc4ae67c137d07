"""read_access: the secret and the transport with which a process outside a job reads rows from its servers."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.env import Environment
from fleet.ps.serving.read_line import ReadAccess
from fleet.ps.wire.transport import SocketTransport
from fleet.ps_job.server_settings import read_worker_tls
from fleet.ps_job.user_secret import read_job_secret


def read_access(endpoints: Sequence[str], job: str | None, wire: str) -> ReadAccess:
    """Returns the access of a ``fleet.ps.Reader`` to servers, by FLEET_JOB_SECRET and FLEET_PS_CA.

    Raises:
        ConfigError: there is no secret, or it cannot be read.
    """
    environment = Environment()
    transport = SocketTransport(client_tls=read_worker_tls(environment))
    return ReadAccess(read_job_secret(environment, endpoints), transport, job, wire)
