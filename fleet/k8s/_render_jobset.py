"""A PaddleJob as a JobSet: one Indexed Job for each role, names instead of addresses."""

from __future__ import annotations

import copy

from fleet.errors import UnsupportedOptionError
from fleet.k8s._contract import ELASTIC_NP, first_port, plan_elastic_variables, plan_variables
from fleet.k8s._objects import (
    LABEL_JOB,
    LABEL_TYPE,
    POD_GROUP_ANNOTATION,
    Document,
    plan_own_variables,
    plan_pod_group,
    restart_policy,
    secret_variables,
)
from fleet.k8s._paddle_job import HOST, PS, VOLCANO, WORKER, PaddleJob, PodRole

COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_WITHOUT_LIMIT = 2147483647


def plan_jobset(job: PaddleJob, etcd_server: str | None) -> list[Document]:
    """Returns the JobSet, and Volcano's PodGroup before it where the job has one.

    Raises UnsupportedOptionError for an elastic job with bounds, and for a pod that always restarts.

    The job succeeds when the workers do; servers that still run are then ended. It fails with the first pod that
    fails permanently.
    """
    worker = job.worker
    if job.is_elastic and (worker.requests, worker.limits) not in ((None, None), (worker.replicas, worker.replicas)):
        raise UnsupportedOptionError(
            f"spec.worker has requests {worker.requests} and limits {worker.limits}, and the size of a JobSet is "
            "fixed. Omit them (failed pods restart anyway), or run the job with the operator."
        )
    for role in job.roles:
        if role.pod_spec.get("restartPolicy") == "Always":
            raise UnsupportedOptionError(
                f"spec.{role.name}.template.spec.restartPolicy is 'Always', which a Job refuses: it would never end. "
                "Write Never or OnFailure."
            )
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [WORKER]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [_replicated_job(job, role, etcd_server) for role in job.roles],
    }
    metadata = {"name": job.name, "namespace": job.namespace, "labels": {**job.labels, LABEL_JOB: job.name}}
    jobset = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}
    return [*([plan_pod_group(job)] if job.uses_volcano else []), jobset]


def host_name(job: PaddleJob, role: str, index: str) -> str:
    """Returns the name of a pod in the JobSet's headless service."""
    return f"{job.name}-{role}-0-{index}.{job.name}"


def _replicated_job(job: PaddleJob, role: PodRole, etcd_server: str | None) -> Document:
    restarts = restart_policy(job, role) == "OnFailure"
    replicated: Document = {
        "name": role.name,
        "replicas": 1,
        "template": {
            "spec": {
                "completionMode": "Indexed",
                "completions": role.replicas,
                "parallelism": role.replicas,
                "backoffLimit": _WITHOUT_LIMIT if restarts else 0,
                "template": _pod_template(job, role, etcd_server),
            }
        },
    }
    # Volcano starts all pods or none, so the workers cannot start later; they wait for the servers themselves.
    if job.has_servers and role.name == WORKER and not job.uses_volcano:
        replicated["dependsOn"] = [{"name": PS, "status": "Ready"}]
    return replicated


def _pod_template(job: PaddleJob, role: PodRole, etcd_server: str | None) -> Document:
    template = copy.deepcopy(dict(role.template))
    metadata = dict(template.get("metadata") or {})
    for name in ("name", "namespace"):
        metadata.pop(name, None)
    metadata["labels"] = {**(metadata.get("labels") or {}), LABEL_JOB: job.name, LABEL_TYPE: role.name}
    spec: Document = dict(template["spec"])
    spec["restartPolicy"] = restart_policy(job, role)
    if job.uses_volcano:
        spec["schedulerName"] = VOLCANO
        metadata["annotations"] = {**(metadata.get("annotations") or {}), POD_GROUP_ANNOTATION: job.name}
    container = spec["containers"][0]
    secret = secret_variables(job, container, needed=job.has_servers)
    container["env"] = [*(container.get("env") or []), *_variables(job, role, etcd_server), *secret]
    if job.intranet == HOST:
        port = first_port(job)
        container["ports"] = [*(container.get("ports") or []), {"containerPort": port, "hostPort": port}]
        spec |= {"hostNetwork": True, "dnsPolicy": spec.get("dnsPolicy") or "ClusterFirstWithHostNet"}
    return {"metadata": metadata, "spec": spec}


def _variables(job: PaddleJob, role: PodRole, etcd_server: str | None) -> list[Document]:
    index, *kind = plan_own_variables(role, "")
    index = {"name": index["name"], "valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX}}}
    address = {"name": "POD_IP", "value": host_name(job, role.name, "$(PADDLE_TRAINER_ID)")}
    if job.is_elastic:
        shared = {**plan_elastic_variables(job, etcd_server), ELASTIC_NP: f"{job.worker.replicas}"}
    else:
        hosts = {r.name: [host_name(job, r.name, f"{i}") for i in range(r.replicas)] for r in job.roles}
        shared = plan_variables(job, hosts)
    return [index, address, *kind, *({"name": name, "value": value} for name, value in shared.items())]
