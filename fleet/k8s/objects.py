"""Pods, services, the ConfigMap and the PodGroup of a PaddleJob, as Kubernetes documents."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from fleet.k8s.contract import (
    ELASTIC_NP,
    PORTS_PER_POD,
    TRAINING_ROLES,
    first_port,
    plan_elastic_variables,
    pod_name,
)
from fleet.k8s.paddle_job import API_VERSION, HOST, KIND, SERVICE, VOLCANO, WORKER, PaddleJob, PodRole

Document = dict[str, Any]
# Names of paddle-operator, which users' selectors and dashboards know.
LABEL_NAME = "paddle-res-name"
LABEL_TYPE = "paddle-res-type"
ANNOTATION = "paddle-resource"
LABEL_JOB = "batch.paddlepaddle.org/job"
JOB_SECRET = "FLEET_JOB_SECRET"
SECRET_FIELD = "secret"
POD_GROUP_ANNOTATION = "scheduling.k8s.io/group-name"


def plan_pod(job: PaddleJob, role: PodRole, index: int, etcd_server: str | None = None) -> Document:
    """Returns pod ``index`` of ``role``: the user's template with the job's variables in its first container.

    A pod of a fixed-size job reads the endpoint lists from the ConfigMap, so it starts when that exists. A pod of an
    elastic job reads from it only the number of pods, again at every start of the container.
    """
    name = pod_name(job, role.name, index)
    template = copy.deepcopy(dict(role.template))
    metadata = dict(template.get("metadata") or {})
    spec: Document = dict(template["spec"])
    metadata |= {"name": name, "namespace": job.namespace}
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        LABEL_NAME: name,
        LABEL_TYPE: role.name,
        LABEL_JOB: job.name,
    }
    metadata["annotations"] = {**(metadata.get("annotations") or {}), ANNOTATION: role.name}
    spec |= {"hostname": name, "subdomain": name}
    spec["restartPolicy"] = restart_policy(job, role)
    if job.uses_volcano:
        spec["schedulerName"] = VOLCANO
        metadata["annotations"][POD_GROUP_ANNOTATION] = job.name
    container = spec["containers"][0]
    address = {"name": "POD_IP", **_address(job, name)}
    container["env"] = [*(container.get("env") or []), address, *plan_own_variables(role, f"{index}")]
    container["env"] += secret_variables(job, container, needed=True)
    if job.is_elastic:
        container["env"] += [*_named(plan_elastic_variables(job, etcd_server)), _np_variable(job)]
    else:
        container["envFrom"] = [*(container.get("envFrom") or []), {"configMapRef": {"name": job.name}}]
    if job.intranet == HOST:
        # The host port keeps two pods of the job off the same node, where they would share address and port.
        port = first_port(job)
        container["ports"] = [*(container.get("ports") or []), {"containerPort": port, "hostPort": port}]
        spec |= {"hostNetwork": True, "dnsPolicy": spec.get("dnsPolicy") or "ClusterFirstWithHostNet"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, **owner(job)}, "spec": spec}


def restart_policy(job: PaddleJob, role: PodRole) -> str:
    """Returns the user's restartPolicy; without one, OnFailure for pods that can restart, else Never."""
    if job.is_elastic:
        return "OnFailure"
    given = role.pod_spec.get("restartPolicy")
    if given:
        return f"{given}"
    return "OnFailure" if role.name == WORKER and job.intranet == SERVICE else "Never"


def plan_own_variables(role: PodRole, index: str) -> list[Document]:
    """Returns the variables with the role and index of a pod."""
    return [
        {"name": "PADDLE_TRAINER_ID", "value": index},
        {"name": "TRAINING_ROLE", "value": TRAINING_ROLES[role.name]},
        {"name": "PADDLE_TRAINING_ROLE", "value": TRAINING_ROLES[role.name]},
    ]


def secret_name(job: PaddleJob) -> str:
    """Returns the name of the Secret with the job's key; an operator creates one for each job it sees."""
    return f"{job.name}-key-{job.uid[:8]}" if job.uid else f"{job.name}-key"


def secret_variables(job: PaddleJob, container: Mapping[str, Any], *, needed: bool) -> list[Document]:
    """Returns the variable with which the processes prove that they belong to the job; none where the user set it.

    A container waits for a Secret that is ``needed``; parameter servers refuse to listen without one.
    """
    if any(item["name"] == JOB_SECRET for item in container.get("env") or []):
        return []
    reference = {"name": secret_name(job), "key": SECRET_FIELD, **({} if needed else {"optional": True})}
    return [{"name": JOB_SECRET, "valueFrom": {"secretKeyRef": reference}}]


def plan_secret(job: PaddleJob) -> Document:
    """Returns the Secret without its key, which is generated when the Secret is created."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": secret_name(job),
            "namespace": job.namespace,
            "labels": {LABEL_JOB: job.name},
            **owner(job),
        },
    }


def _address(job: PaddleJob, name: str) -> Document:
    if job.intranet == SERVICE:
        return {"value": name}
    path = "status.hostIP" if job.intranet == HOST else "status.podIP"
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _np_variable(job: PaddleJob) -> Document:
    return {"name": ELASTIC_NP, "valueFrom": {"configMapKeyRef": {"name": job.name, "key": ELASTIC_NP}}}


def _named(variables: Mapping[str, str]) -> list[Document]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def plan_service(job: PaddleJob, role: PodRole, index: int) -> Document:
    """Returns the headless service that resolves the name of pod ``index``, even before the pod is ready."""
    name = pod_name(job, role.name, index)
    first = first_port(job)
    ports = [{"name": f"p-{i}", "port": first + i} for i in range(PORTS_PER_POD)]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": job.namespace, "labels": {LABEL_JOB: job.name}, **owner(job)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_NAME: name},
            "ports": ports,
        },
    }


def plan_config_map(job: PaddleJob, data: Mapping[str, str]) -> Document:
    """Returns the ConfigMap that the pods read ``data`` from."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": job.name, "namespace": job.namespace, "labels": {LABEL_JOB: job.name}, **owner(job)},
        "data": dict(data),
    }


def plan_pod_group(job: PaddleJob) -> Document:
    """Returns Volcano's PodGroup: the pods start together or not at all."""
    policy = job.scheduling or {}
    spec: Document = {"minMember": policy.get("minAvailable", sum(role.replicas for role in job.roles))}
    for key, name in (("queue", "queue"), ("priorityClass", "priorityClassName"), ("minResources", "minResources")):
        if key in policy:
            spec[name] = policy[key]
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": {"name": job.name, "namespace": job.namespace, "labels": {LABEL_JOB: job.name}, **owner(job)},
        "spec": spec,
    }


def owner(job: PaddleJob) -> Document:
    """Returns the owner reference with which Kubernetes deletes an object together with the job."""
    if not job.uid:
        return {}
    reference = {"apiVersion": API_VERSION, "kind": KIND, "name": job.name, "uid": job.uid}
    return {"ownerReferences": [{**reference, "controller": True, "blockOwnerDeletion": True}]}
