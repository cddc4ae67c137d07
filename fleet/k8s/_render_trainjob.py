"""A collective PaddleJob as a Kubeflow TrainJob with its own runtime, which holds the pod template."""

from __future__ import annotations

import copy
import re

from fleet.errors import UnsupportedOptionError
from fleet.k8s._objects import LABEL_JOB, Document, restart_policy, secret_variables
from fleet.k8s._paddle_job import HOST, PaddleJob

# Kubeflow's controller finds the trainer by this label and this container name.
_STEP_LABEL, NODE = "trainer.kubeflow.org/trainjob-ancestor-step", "node"
_API_VERSION = "trainer.kubeflow.org/v1alpha1"
_TORCHRUN = re.compile(r"PET_(NNODES|NPROC_PER_NODE|NODE_RANK|MASTER_ADDR|MASTER_PORT)")


def plan_trainjob(job: PaddleJob, etcd_server: str | None) -> list[Document]:
    """Returns a TrainingRuntime and the TrainJob that uses it.

    Kubeflow sets torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR ...), which the launcher reads.
    Raises UnsupportedOptionError for a job that is more than a fixed number of workers.
    """
    _check(job)
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


def _check(job: PaddleJob) -> None:
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
