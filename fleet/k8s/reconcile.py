"""The operator's next actions and the status of one PaddleJob: pure functions of the job and its existing objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from fleet.errors import FleetError
from fleet.k8s.contract import ELASTIC_NP, elastic_job_id, plan_variables, pod_name
from fleet.k8s.objects import LABEL_TYPE, Document, plan_config_map, plan_pod, plan_pod_group, plan_secret, plan_service
from fleet.k8s.paddle_job import (
    ALWAYS,
    HOST,
    NEVER,
    ON_COMPLETION,
    ON_FAILURE,
    PS,
    SERVICE,
    WORKER,
    PaddleJob,
    read_job,
)

_YOUNG_S = 10.0
# The verbs of a ClusterAction.
CREATE, DELETE, PATCH, SCALE, CLEAN = "create", "delete", "patch", "scale", "clean"
# The phases of a PaddleJob, by paddle-operator's names.
PENDING, STARTING, RUNNING, SCALING = "Pending", "Starting", "Running", "Scaling"
COMPLETED, FAILED, TERMINATING = "Completed", "Failed", "Terminating"
FINAL = (COMPLETED, FAILED)
_COUNTS = ("pending", "starting", "running", "failed", "succeeded", "unknown")


@dataclass(frozen=True, kw_only=True)
class ClusterAction:
    """One change: an object to ``create``, ``delete`` or ``patch``, or the job in etcd to ``scale`` or ``clean``."""

    verb: str
    kind: str
    name: str
    body: Document = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """The objects of the job that the cluster has now."""

    pods: Sequence[Mapping[str, Any]] = ()
    services: Sequence[Mapping[str, Any]] = ()
    config_map: Mapping[str, Any] | None = None
    pod_group: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ClusterPlan:
    """The changes, in order, and the status to write after them; None does not change the status."""

    actions: tuple[ClusterAction, ...]
    status: Document | None


def plan_reconcile(
    document: Mapping[str, Any], observed: Observed, *, now: str, etcd_server: str | None = None
) -> ClusterPlan:
    """Returns the next step towards the state that the job asks for.

    Args:
        document: the PaddleJob as the cluster holds it, with its status.
        observed: the objects that belong to it.
        now: the time, as Kubernetes writes times.
        etcd_server: host:port of etcd, passed to the pods of elastic jobs; their size changes are written there.

    It is idempotent: called again with the result of its actions, it returns none.
    """
    old: Mapping[str, Any] = document.get("status") or {}
    if document["metadata"].get("deletionTimestamp"):
        return _with_status([], document, {**old, "phase": TERMINATING})
    try:
        job = read_job(document)
    except FleetError as error:
        if old.get("phase") in FINAL:
            return ClusterPlan((), None)
        if observed.pods:  # a running job was edited: it continues unchanged
            phase = end_of_pods(observed.pods, is_elastic=document["spec"].get("elastic") == 1)
            if phase is None:
                return _with_status([], document, {**old, "message": f"{error} The job continues unchanged."})
            ended = {"phase": phase, "completionTime": now}
            message = f"{_end_message(phase, observed.pods)} {error}".strip()
            return _with_status([], document, {**old, **ended, "message": message})
        ended = {"completionTime": old.get("completionTime") or now}
        return _with_status([], document, {**old, **ended, "phase": FAILED, "message": f"{error}"})
    if old.get("phase") in FINAL:
        return ClusterPlan(tuple(_clean(job, f"{old['phase']}", observed)), None)
    job, message = _at_fixed_size(job, observed)
    actions, lost = _plan_objects(job, observed, etcd_server, now)
    statuses = role_statuses(job, _wanted_pods(job, observed.pods))
    phase = derive_phase(job, statuses, old.get("phase"))
    if lost and phase not in FINAL:
        phase = FAILED
        actions = []
        message = f"The pod {lost} is gone, and the other pods know only its old address. Create the job again."
    if phase == RUNNING and any(action.verb == SCALE for action in actions):
        phase = SCALING
    if phase in FINAL:
        actions = []
        message = message or _end_message(phase, observed.pods)
    began = min((time for pod in observed.pods if (time := (pod.get("status") or {}).get("startTime"))), default=None)
    return _with_status(actions, document, next_status(job, old, statuses, phase, message, now, began))


def _with_status(actions: list[ClusterAction], document: Mapping[str, Any], status: Document) -> ClusterPlan:
    status["observedGeneration"] = document["metadata"].get("generation", 0)
    old = document.get("status") or {}
    changed = any(old.get(key) != value for key, value in status.items())
    return ClusterPlan(tuple(actions), status if changed else None)


def _at_fixed_size(job: PaddleJob, observed: Observed) -> tuple[PaddleJob, str]:
    """Returns the job at the size its pods were given, and a message when a different one was requested."""
    if job.is_elastic or observed.config_map is None:
        return job, ""
    data = observed.config_map.get("data") or {}
    told = {
        WORKER: int(data.get("PADDLE_TRAINERS_NUM", job.worker.replicas)),
        PS: len([end for end in data.get("PADDLE_PSERVERS_IP_PORT_LIST", "").split(",") if end]),
    }
    changed = [role.name for role in job.roles if role.replicas != told[role.name]]
    if not changed:
        return job, ""
    roles = tuple(replace(role, replicas=told[role.name], requests=None, limits=None) for role in job.roles)
    wanted = ", ".join(f"{role.name}.replicas is {role.replicas}" for role in job.roles if role.name in changed)
    running = ", ".join(f"{told[name]}" for name in changed)
    return replace(job, roles=roles), (
        f"{wanted} and the job runs with {running}: its processes were given that number. Only worker.replicas of "
        "elastic jobs can be edited."
    )


def _wanted_pods(job: PaddleJob, pods: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    names = {pod_name(job, role.name, index) for role in job.roles for index in range(role.replicas)}
    return [pod for pod in pods if pod["metadata"]["name"] in names]


def _plan_objects(
    job: PaddleJob, observed: Observed, etcd_server: str | None, now: str
) -> tuple[list[ClusterAction], str]:
    """Returns the changes to objects, and the name of a pod whose loss the job cannot survive."""
    there = {pod["metadata"]["name"]: pod for pod in observed.pods}
    services = {service["metadata"]["name"] for service in observed.services}
    places = [(role, index) for role in job.roles for index in range(role.replicas)]
    wanted = {pod_name(job, role.name, index) for role, index in places}
    first: list[ClusterAction] = []
    if not observed.pods and observed.config_map is None:
        # An earlier job with this name may have left a record in etcd, which would end this one.
        if job.is_elastic and etcd_server is not None:
            first.append(ClusterAction(verb=CLEAN, kind="etcd", name=elastic_job_id(job)))
        secret = plan_secret(job)
        first.append(ClusterAction(verb=CREATE, kind="Secret", name=secret["metadata"]["name"], body=secret))
    if job.uses_volcano and observed.pod_group is None:
        first.append(ClusterAction(verb=CREATE, kind="PodGroup", name=job.name, body=plan_pod_group(job)))
    first += _plan_data(job, observed)
    pods: list[ClusterAction] = []
    lost = ""
    for role, index in places:
        name = pod_name(job, role.name, index)
        if job.intranet == SERVICE and name not in services:
            first.append(ClusterAction(verb=CREATE, kind="Service", name=name, body=plan_service(job, role, index)))
        if name in there:
            continue
        # The ConfigMap is written once all pods have addresses; a pod made after that has another address.
        if observed.config_map is not None and not job.is_elastic and job.intranet != SERVICE:
            lost = lost or name
        pods.append(ClusterAction(verb=CREATE, kind="Pod", name=name, body=plan_pod(job, role, index, etcd_server)))
    for name, pod in there.items():
        unwanted = name not in wanted or (job.is_elastic and _has_failed_for_good(pod, now))
        if unwanted and not pod["metadata"].get("deletionTimestamp"):
            pods.append(ClusterAction(verb=DELETE, kind="Pod", name=name))
    return [*first, *pods], lost


def _has_failed_for_good(pod: Mapping[str, Any], now: str) -> bool:
    """Returns whether a pod was evicted or lost its node: its containers do not restart, so it must be replaced.

    A very young pod was refused by its node, which would refuse the replacement as well; it is checked again later.
    """
    made = pod["metadata"].get("creationTimestamp")
    is_young = made is not None and (_time(now) - _time(made)).total_seconds() < _YOUNG_S
    return (pod.get("status") or {}).get("phase") == "Failed" and not is_young


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ")


def _plan_data(job: PaddleJob, observed: Observed) -> list[ClusterAction]:
    """Returns the changes that bring the ConfigMap up to date."""
    if job.is_elastic:
        return _plan_size(job, observed)
    if observed.config_map is not None:
        return []
    hosts = pod_hosts(job, observed.pods)
    if hosts is None:
        return []
    return [
        ClusterAction(
            verb=CREATE, kind="ConfigMap", name=job.name, body=plan_config_map(job, plan_variables(job, hosts))
        )
    ]


def _plan_size(job: PaddleJob, observed: Observed) -> list[ClusterAction]:
    """Returns the changes that publish an elastic job's size: etcd first, so that a failure there is retried."""
    size = f"{job.worker.replicas}"
    config_map = plan_config_map(job, {ELASTIC_NP: size})
    if observed.config_map is None:
        return [ClusterAction(verb=CREATE, kind="ConfigMap", name=job.name, body=config_map)]
    if (observed.config_map.get("data") or {}).get(ELASTIC_NP) == size:
        return []
    group = []
    # With the old number, Volcano would never start a replacement pod.
    if observed.pod_group is not None:
        body = {"spec": {"minMember": plan_pod_group(job)["spec"]["minMember"]}}
        group = [ClusterAction(verb=PATCH, kind="PodGroup", name=job.name, body=body)]
    return [
        ClusterAction(verb=SCALE, kind="etcd", name=elastic_job_id(job), body={"replicas": job.worker.replicas}),
        *group,
        ClusterAction(verb=PATCH, kind="ConfigMap", name=job.name, body={"data": {ELASTIC_NP: size}}),
    ]


def pod_hosts(job: PaddleJob, pods: Sequence[Mapping[str, Any]]) -> dict[str, list[str]] | None:
    """Returns the address or name of each pod by role; None while a pod has no address yet."""
    there = {pod["metadata"]["name"]: pod.get("status") or {} for pod in pods}
    hosts: dict[str, list[str]] = {}
    for role in job.roles:
        names = [pod_name(job, role.name, index) for index in range(role.replicas)]
        if job.intranet == SERVICE:
            hosts[role.name] = names
            continue
        key = "hostIP" if job.intranet == HOST else "podIP"
        found = [there.get(name, {}).get(key) for name in names]
        if not all(found):
            return None
        hosts[role.name] = [f"{address}" for address in found]
    return hosts


def _clean(job: PaddleJob, phase: str, observed: Observed) -> list[ClusterAction]:
    """Returns the deletions at the end of the job."""
    policy = job.clean_pod_policy or ON_COMPLETION
    if (
        policy == NEVER
        or (policy == ON_FAILURE and phase == COMPLETED)
        or (policy == ON_COMPLETION and phase == FAILED)
    ):
        return []
    assert policy in (ALWAYS, ON_FAILURE, ON_COMPLETION)
    going = [pod for pod in observed.pods if not pod["metadata"].get("deletionTimestamp")]
    actions = [ClusterAction(verb=DELETE, kind="Pod", name=pod["metadata"]["name"]) for pod in going]
    return [
        *actions,
        *(ClusterAction(verb=DELETE, kind="Service", name=s["metadata"]["name"]) for s in observed.services),
    ]


def _end_message(phase: str, pods: Sequence[Mapping[str, Any]]) -> str:
    if phase != FAILED:
        return ""
    for pod in pods:
        status = pod.get("status") or {}
        if status.get("phase") == "Failed":
            codes = [
                f"{container.get('name')} exited with {ended['exitCode']}"
                for container in status.get("containerStatuses") or []
                if (ended := (container.get("state") or {}).get("terminated")) and ended.get("exitCode")
            ]
            detail = "; ".join(codes) or status.get("message") or status.get("reason") or "no reason is given"
            return f"The pod {pod['metadata']['name']} failed: {detail}."
    return ""


def pod_state(pod: Mapping[str, Any]) -> str:
    """Returns the state of one pod: one of the counts of a role's status.

    A pod that Kubernetes calls Running is "starting" while one of its containers does not run.
    """
    status = pod.get("status") or {}
    phase = status.get("phase") or "Pending"
    if phase == "Running":
        containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
        up = all(c.get("ready") for c in containers) and status.get("containerStatuses")
        return "running" if up else "starting"
    states = {"Pending": "pending", "Succeeded": "succeeded", "Failed": "failed"}
    return states.get(phase, "unknown")


def role_statuses(job: PaddleJob, pods: Sequence[Mapping[str, Any]]) -> dict[str, Document]:
    """Returns the counts and references of each role."""
    made: dict[str, Document] = {}
    for role in job.roles:
        own = [pod for pod in pods if pod["metadata"].get("labels", {}).get(LABEL_TYPE) == role.name]
        states = [pod_state(pod) for pod in own]
        counts: Document = {name: states.count(name) for name in _COUNTS}
        made[role.name] = {**counts, "refs": [_reference(pod) for pod in _by_index(own)]}
    return made


def _by_index(pods: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(pods, key=lambda pod: int(pod["metadata"]["name"].rpartition("-")[2]))


def _reference(pod: Mapping[str, Any]) -> Document:
    metadata = pod["metadata"]
    reference = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": metadata["name"],
        "namespace": metadata.get("namespace", ""),
    }
    return {**reference, **({"uid": metadata["uid"]} if metadata.get("uid") else {})}


def derive_phase(job: PaddleJob, statuses: Mapping[str, Mapping[str, Any]], previous: str | None) -> str:
    """Returns the phase that follows from the pods' states, ``previous`` where none does.

    Roles are checked one by one, servers first: a failed pod ends the job; otherwise a starting or waiting pod sets the
    phase. A job is Running when every pod runs, and Completed when every pod, servers included, has exited with 0. A
    failed pod of an elastic job will be replaced, so it counts as waiting.
    """
    if previous in FINAL:
        return f"{previous}"
    for role in job.roles:
        status = statuses[role.name]
        if status["failed"] and not job.is_elastic:
            return FAILED
        if status["starting"] or status["pending"] or status["failed"]:
            scaled = job.is_elastic and previous in (RUNNING, SCALING)
            return SCALING if scaled else STARTING if status["starting"] else PENDING
    if all(statuses[role.name]["running"] == role.replicas for role in job.roles):
        return RUNNING
    if all(statuses[role.name]["succeeded"] == role.replicas for role in job.roles):
        return COMPLETED
    if job.is_elastic and previous in (RUNNING, SCALING) and any(_missing(job, statuses)):
        return SCALING
    return previous or PENDING


def end_of_pods(pods: Sequence[Mapping[str, Any]], *, is_elastic: bool) -> str | None:
    """Returns the phase in which a job ended whose document has since become invalid; None while it runs."""
    states = [pod_state(pod) for pod in pods]
    if "failed" in states and not is_elastic:
        return FAILED
    return COMPLETED if states and set(states) == {"succeeded"} else None


def _missing(job: PaddleJob, statuses: Mapping[str, Mapping[str, Any]]) -> Iterable[bool]:
    return (len(statuses[role.name]["refs"]) != role.replicas for role in job.roles)


def next_status(
    job: PaddleJob,
    old: Mapping[str, Any],
    statuses: Mapping[str, Document],
    phase: str,
    message: str,
    now: str,
    began: str | None = None,
) -> Document:
    """Returns the whole status; the times are set once.

    A job that completes between two checks was never seen running; then ``began``, the start of its first pod, counts.
    """
    status: Document = {"phase": phase, "mode": job.mode, "message": message, **statuses}
    started = old.get("startTime") or {RUNNING: now, COMPLETED: began or now}.get(phase)
    ended = old.get("completionTime") or (now if phase in FINAL else None)
    if started:
        status["startTime"] = started
    if ended:
        status["completionTime"] = ended
    if job.is_elastic:
        status["elastic"] = f"{job.worker.replicas}"
    return status
