"""The state of a PaddleJob, derived from its pods: the status that ``kubectl get pdj`` shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleet.k8s.objects import LABEL_TYPE, Document
from fleet.k8s.paddle_job import PaddleJob

# The phases of a PaddleJob, by paddle-operator's names.
PENDING, STARTING, RUNNING, SCALING = "Pending", "Starting", "Running", "Scaling"
COMPLETED, FAILED, TERMINATING = "Completed", "Failed", "Terminating"
FINAL = (COMPLETED, FAILED)
_COUNTS = ("pending", "starting", "running", "failed", "succeeded", "unknown")


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
