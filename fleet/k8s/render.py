"""Translates a PaddleJob into objects for a cluster without its operator: plain pods, a JobSet or a TrainJob."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.k8s.contract import ELASTIC_NP, first_port, plan_elastic_variables, plan_variables, pod_name
from fleet.k8s.objects import (
    JOB_SECRET,
    LABEL_JOB,
    LABEL_TYPE,
    POD_GROUP_ANNOTATION,
    SECRET_FIELD,
    Document,
    plan_config_map,
    plan_own_variables,
    plan_pod,
    plan_pod_group,
    plan_service,
    restart_policy,
    secret_name,
    secret_variables,
)
from fleet.k8s.paddle_job import (
    HOST,
    NEVER,
    POD_IP,
    PS,
    SERVICE,
    VOLCANO,
    WORKER,
    PaddleJob,
    PodRole,
    check_service_name,
    is_label,
)

COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_WITHOUT_LIMIT = 2147483647  # of restarts; the largest number that a Job takes
# Kubeflow's controller finds the trainer by this label and this container name.
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
NODE = "node"
_API_VERSION = "trainer.kubeflow.org/v1alpha1"
_TORCHRUN = re.compile(r"PET_(NNODES|NPROC_PER_NODE|NODE_RANK|MASTER_ADDR|MASTER_PORT)")


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
    # Nobody knows the addresses of plain pods before they run, so the lists hold the names of services.
    named = replace(job, intranet=job.intranet if job.intranet == HOST else SERVICE)
    pairs = [(role, index) for role in named.roles for index in range(role.replicas)]
    hosts = {role.name: [pod_name(job, role.name, i) for i in range(role.replicas)] for role in named.roles}
    data = {ELASTIC_NP: f"{job.worker.replicas}"} if job.is_elastic else plan_variables(named, hosts)
    # Services and ConfigMap come first: a pod resolves its peers by the former and reads its variables from the
    # latter when it starts.
    documents = [plan_service(named, role, index) for role, index in pairs]
    documents.append(plan_config_map(named, data))
    if named.uses_volcano:
        documents.append(plan_pod_group(named))
    for role, index in pairs:
        pod = plan_pod(named, role, index, etcd_server)
        _call_by_name(pod, pod_name(job, role.name, index))
        pod["spec"]["restartPolicy"] = restart_policy(job, role)
        # Pods of a job with servers wait for the Secret; the others also run without it.
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


# ---- JobSet ----------------------------------------------------------------------------------------------------------


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
        # Processes look each other up while they start, before any pod is ready.
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [WORKER]},
        # The set never restarts as a whole: the first pod that fails permanently ends the job.
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
                # With OnFailure pods restart without limit; otherwise the first failed pod fails the job.
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
    # The template belongs to the caller's document, which the changes below must not reach.
    template = copy.deepcopy(dict(role.template))
    metadata = dict(template.get("metadata") or {})
    # The Job names its pods and places them in its namespace.
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
        # On the host's network a pod resolves the cluster's names under this policy only.
        spec |= {"hostNetwork": True, "dnsPolicy": spec.get("dnsPolicy") or "ClusterFirstWithHostNet"}
    return {"metadata": metadata, "spec": spec}


def _variables(job: PaddleJob, role: PodRole, etcd_server: str | None) -> list[Document]:
    index, *kind = plan_own_variables(role, "")
    index = {"name": index["name"], "valueFrom": {"fieldRef": {"fieldPath": COMPLETION_INDEX}}}
    # The kubelet expands $(...) from variables that stand earlier in the list, so the index must precede it.
    address = {"name": "POD_IP", "value": host_name(job, role.name, "$(PADDLE_TRAINER_ID)")}
    if job.is_elastic:
        shared = {**plan_elastic_variables(job, etcd_server), ELASTIC_NP: f"{job.worker.replicas}"}
    else:
        hosts = {r.name: [host_name(job, r.name, f"{i}") for i in range(r.replicas)] for r in job.roles}
        shared = plan_variables(job, hosts)
    return [index, address, *kind, *({"name": name, "value": value} for name, value in shared.items())]


# ---- TrainJob --------------------------------------------------------------------------------------------------------


def plan_trainjob(job: PaddleJob, etcd_server: str | None) -> list[Document]:
    """Returns a TrainingRuntime and the TrainJob that uses it.

    Kubeflow sets torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR ...), which the launcher reads.
    Raises UnsupportedOptionError for a job that is more than a fixed number of workers.
    """
    _check_trainjob(job)
    worker = job.worker
    template = copy.deepcopy(dict(worker.template))
    container = template["spec"]["containers"][0]
    container["name"] = NODE
    container["env"] = [*(container.get("env") or []), *secret_variables(job, container, needed=False)]
    processes = gpus(container) or 1
    template["spec"]["restartPolicy"] = restart_policy(job, worker)
    metadata = {"name": job.name, "namespace": job.namespace, "labels": {**job.labels, LABEL_JOB: job.name}}
    node = {
        "name": NODE,
        "template": {
            "metadata": {"labels": {_STEP_LABEL: "trainer"}},
            "spec": {"backoffLimit": 0, "template": {k: v for k, v in template.items() if k in ("metadata", "spec")}},
        },
    }
    runtime = {
        "apiVersion": _API_VERSION,
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": worker.replicas, "torch": {}},
            "template": {"spec": {"failurePolicy": {"maxRestarts": 0}, "replicatedJobs": [node]}},
        },
    }
    trainjob = {
        "apiVersion": _API_VERSION,
        "kind": "TrainJob",
        "metadata": copy.deepcopy(metadata),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name},
            "trainer": {"numNodes": worker.replicas, "numProcPerNode": processes},
        },
    }
    return [runtime, trainjob]


def gpus(container: Document) -> int:
    """Returns how many NVIDIA GPUs the container gets."""
    limits = (container.get("resources") or {}).get("limits") or {}
    text = f"{limits.get('nvidia.com/gpu', 0)}"
    return int(text) if text.isdigit() else 0


def _check_trainjob(job: PaddleJob) -> None:
    where = "Use --to jobset or --to pods, or run the job with the operator."
    if job.has_servers:
        raise UnsupportedOptionError(
            f"spec.ps is set, and a TrainJob has no parameter servers: its nodes are all alike. {where}"
        )
    if job.is_elastic:
        raise UnsupportedOptionError(
            f"spec.elastic is 1, and a TrainJob's torch runtime has a fixed number of nodes. {where}"
        )
    if job.uses_volcano:
        raise UnsupportedOptionError(
            "spec.schedulingPolicy or schedulerName asks for Volcano; for a TrainJob the cluster's administrator "
            f"sets this in the runtime's podGroupPolicy. {where}"
        )
    if job.intranet == HOST:
        raise UnsupportedOptionError(
            f"spec.intranet is Host, and Kubeflow gives every TrainJob the same port, so two would clash. {where}"
        )
    policy = restart_policy(job, job.worker)
    if policy != "Never":
        raise UnsupportedOptionError(
            f"A pod of this job restarts on its own ({policy}), and the other nodes of a TrainJob would not know. "
            "Write restartPolicy: Never."
        )
    for variable in job.worker.pod_spec["containers"][0].get("env") or []:
        if _TORCHRUN.fullmatch(variable["name"]):
            raise UnsupportedOptionError(f"The container sets {variable['name']}, which Kubeflow sets. Omit it.")


TARGETS: Mapping[str, Callable[[PaddleJob, str | None], list[Document]]] = {
    "jobset": plan_jobset,
    "trainjob": plan_trainjob,
    "pods": plan_pods,
}
