"""Translates a PaddleJob into objects that a cluster without its operator can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.k8s._contract import ELASTIC_NP, plan_variables, pod_name
from fleet.k8s._objects import (
    JOB_SECRET,
    SECRET_FIELD,
    Document,
    plan_config_map,
    plan_pod,
    plan_pod_group,
    plan_service,
    restart_policy,
    secret_name,
    secret_variables,
)
from fleet.k8s._paddle_job import HOST, NEVER, POD_IP, SERVICE, PaddleJob, check_service_name, is_label
from fleet.k8s._render_jobset import plan_jobset
from fleet.k8s._render_trainjob import NODE, plan_trainjob


@dataclass(frozen=True)
class Rendered:
    """The documents, in creation order, and notes for the reader."""

    documents: tuple[Document, ...]
    notes: tuple[str, ...]


def render(job: PaddleJob, target: str, etcd_server: str | None = None) -> Rendered:
    """Returns ``job`` as ``target``: "jobset", "trainjob" or "pods".

    Args:
        job: the job.
        target: what to translate to.
        etcd_server: host:port of etcd for an elastic job; without it the launcher uses the service
            ``paddle-elastic-etcd`` of the job's namespace.

    Raises:
        ConfigError: there is no such target.
        UnsupportedOptionError: the target has no equivalent of a field; says why and what to write instead.
    """
    if target not in TARGETS:
        raise ConfigError(f"--to is {target!r}; it takes {', '.join(TARGETS)}.{did_you_mean(target, TARGETS)}")
    _check_clean_pod_policy(job, target)
    _check_names(job, target)
    documents = TARGETS[target](job, etcd_server)
    return Rendered(tuple(documents), tuple(_notes(job, target)))


def _check_clean_pod_policy(job: PaddleJob, target: str) -> None:
    if job.clean_pod_policy in (None, NEVER):
        return
    instead = {
        "pods": "nothing watches plain pods or deletes them at the end",
        "jobset": "a JobSet keeps its finished pods, and its ttlSecondsAfterFinished also deletes the JobSet",
        "trainjob": "a TrainJob keeps its finished pods",
    }[target]
    raise UnsupportedOptionError(
        f"spec.cleanPodPolicy is {job.clean_pod_policy!r} and cannot be translated to {target}: {instead}. Write "
        "Never, or run the job with the operator."
    )


def _check_names(job: PaddleJob, target: str) -> None:
    """Checks the names that the cluster makes from the job's.

    A pod of a JobSet, which a TrainJob also is, is named NAME-ROLE-0-INDEX plus five random characters.
    """
    check_service_name(job.name, f"--to is {target}")
    if target == "pods":
        return
    for role in job.roles:
        part = role.name if target == "jobset" else NODE
        longest = f"{job.name}-{part}-0-{role.replicas - 1}-xxxxx"
        if not is_label(longest):
            raise ConfigError(
                f"metadata.name is {job.name!r}: its pods would have names like {longest!r}, which has {len(longest)} "
                f"characters, and a {target} takes 63. Choose a name that is {len(longest) - 63} shorter."
            )


def _notes(job: PaddleJob, target: str) -> list[str]:
    notes = []
    if job.clean_pod_policy is None:
        notes.append("Finished pods are kept (cleanPodPolicy is not set); kubectl delete removes them.")
    if any(secret_variables(job, role.pod_spec["containers"][0], needed=True) for role in job.roles):
        name = secret_name(job)
        wait = "its pods wait for" if job.has_servers else "its processes authenticate with"
        notes.append(
            f"{job.name}: {wait} the Secret {name}. Create it first: kubectl -n {job.namespace} create secret generic "
            f"{name} --from-literal={SECRET_FIELD}=$(python -c 'import secrets; print(secrets.token_hex(32))')"
        )
    if job.intranet in (None, POD_IP) and target == "pods":
        notes.append("Pods use names, not addresses: only an operator knows the addresses.")
    if job.is_elastic:
        notes.append(
            "A failed pod restarts. The number of pods is fixed: to change it, use the operator, or python -m "
            "fleet.elastic and a new set of pods."
        )
    return notes


def plan_pods(job: PaddleJob, etcd_server: str | None) -> list[Document]:
    """Returns services, ConfigMap and pods that run the job without a controller."""
    named = replace(job, intranet=job.intranet if job.intranet == HOST else SERVICE)
    pairs = [(role, index) for role in named.roles for index in range(role.replicas)]
    hosts = {role.name: [pod_name(job, role.name, i) for i in range(role.replicas)] for role in named.roles}
    data = {ELASTIC_NP: f"{job.worker.replicas}"} if job.is_elastic else plan_variables(named, hosts)
    documents = [plan_service(named, role, index) for role, index in pairs]
    documents.append(plan_config_map(named, data))
    if named.uses_volcano:
        documents.append(plan_pod_group(named))
    for role, index in pairs:
        pod = plan_pod(named, role, index, etcd_server)
        _call_by_name(pod, pod_name(job, role.name, index))
        pod["spec"]["restartPolicy"] = restart_policy(job, role)
        _make_secret_optional(pod, optional=not job.has_servers)
        documents.append(pod)
    return documents


def _make_secret_optional(pod: Document, *, optional: bool) -> None:
    for variable in pod["spec"]["containers"][0]["env"]:
        if variable["name"] == JOB_SECRET and optional and "secretKeyRef" in variable.get("valueFrom", {}):
            variable["valueFrom"]["secretKeyRef"]["optional"] = True


def _call_by_name(pod: Document, name: str) -> None:
    """Sets POD_IP to the pod's name, as in the endpoint lists; with a host network it would be an address."""
    for variable in pod["spec"]["containers"][0]["env"]:
        if variable["name"] == "POD_IP":
            variable.pop("valueFrom", None)
            variable["value"] = name


TARGETS: Mapping[str, Callable[[PaddleJob, str | None], list[Document]]] = {
    "jobset": plan_jobset,
    "trainjob": plan_trainjob,
    "pods": plan_pods,
}
