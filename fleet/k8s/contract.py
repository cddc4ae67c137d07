"""The environment of a PaddleJob's processes: the variables that paddle-operator introduced."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from fleet.k8s.paddle_job import HOST, PS, WORKER, PaddleJob, check_list_size

FIRST_PORT = 36000
PORTS_PER_POD = 20
_PORT_BLOCKS = 1000
_GLOO_OFFSET = PORTS_PER_POD - 2
TRAINING_ROLES = {PS: "PSERVER", WORKER: "TRAINER"}
HTTP_RENDEZVOUS = "3"
ELASTIC_TIMEOUT_S = 60
ELASTIC_NP = "PADDLE_ELASTIC_NP"


def pod_name(job: PaddleJob, role: str, index: int) -> str:
    """Returns ``JOB-ROLE-INDEX``, the name of the pod, its host and its service."""
    return f"{job.name}-{role}-{index}"


def first_port(job: PaddleJob) -> int:
    """Returns the first of the 20 ports that each pod of the job may listen on.

    Each pod has its own address, so every job takes the same ports. With ``intranet: Host``, jobs share the nodes'
    addresses, so the ports are derived from the job's identity: the same in every process, different between most jobs.
    """
    if job.intranet != HOST:
        return FIRST_PORT
    identity = job.uid or f"{job.namespace}/{job.name}"
    return FIRST_PORT + PORTS_PER_POD * (zlib.crc32(identity.encode()) % _PORT_BLOCKS)


def plan_variables(job: PaddleJob, hosts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns the variables of every pod of a fixed-size job.

    Args:
        job: the job.
        hosts: address or name of each pod, by role, in index order.

    Example:
        >>> pod = {"spec": {"containers": [{"name": "paddle", "image": "torch-fleet"}]}}
        >>> from fleet.k8s.paddle_job import PodRole
        >>> job = PaddleJob(name="a", namespace="b", roles=(PodRole(name="worker", replicas=1, template=pod),))
        >>> plan_variables(job, {"worker": ["10.0.0.7"]})["PADDLE_TRAINER_ENDPOINTS"]
        '10.0.0.7:36000'
    """
    port = first_port(job)
    workers = list(hosts[WORKER])
    variables = {
        "PADDLE_PORT": f"{port}",
        "TRAINER_PORTS_NUM": f"{PORTS_PER_POD}",
        "PADDLE_TRAINER_ENDPOINTS": _join(workers, port),
        "PADDLE_TRAINERS": ",".join(workers),
        "PADDLE_TRAINERS_NUM": f"{len(workers)}",
    }
    if job.has_servers:
        servers = list(hosts[PS])
        variables["PADDLE_PSERVERS_IP_PORT_LIST"] = _join(servers, port)
        variables["PADDLE_WITH_GLOO"] = f"{job.with_gloo}"
        if job.with_gloo:
            variables["PADDLE_GLOO_RENDEZVOUS"] = HTTP_RENDEZVOUS
            variables["PADDLE_GLOO_HTTP_ENDPOINT"] = _join(servers[:1], port + _GLOO_OFFSET)
    for role, name in ((WORKER, "PADDLE_TRAINER_ENDPOINTS"), (PS, "PADDLE_PSERVERS_IP_PORT_LIST")):
        check_list_size(role, len(hosts.get(role, ())), len(variables.get(name, "")))
    return variables


def plan_elastic_variables(job: PaddleJob, etcd_server: str | None) -> dict[str, str]:
    """Returns the variables of every pod of an elastic job, but for ``PADDLE_ELASTIC_NP``, which changes.

    Without ``etcd_server``, the launcher finds etcd through the variables that Kubernetes sets for a service named
    ``paddle-elastic-etcd`` in the namespace of the job.
    """
    variables = {
        "PADDLE_ELASTIC_JOB_ID": elastic_job_id(job),
        "PADDLE_ELASTIC_TIMEOUT": f"{ELASTIC_TIMEOUT_S}",
    }
    if etcd_server is not None:
        variables["PADDLE_ELASTIC_SERVER"] = etcd_server
    return variables


def elastic_job_id(job: PaddleJob) -> str:
    """Returns the name of the job in etcd."""
    return f"{job.namespace}-{job.name}"


def _join(hosts: Sequence[str], port: int) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)
