"""Every environment variable the project reads or hands to a process it starts, with its meaning.

``owner`` says who sets it: ``user``, ``launcher`` (Fleet's contract of worker and server processes), ``torch``
(torch's contract, kept beside Fleet's), ``scheduler`` (Slurm, MPI, Kubernetes operators).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, who sets it, its default and what it means."""

    name: str
    owner: str
    default: str | int | float | None
    meaning: str


def _table(*rows: tuple[str, str, str | int | float | None, str]) -> dict[str, Variable]:
    return {name: Variable(name, owner, default, meaning) for name, owner, default, meaning in rows}


VARIABLES: dict[str, Variable] = _table(
    # Who am I: Fleet's contract.
    ("PADDLE_TRAINER_ID", "launcher", 0, "rank of this worker in the job"),
    ("PADDLE_TRAINERS_NUM", "launcher", 1, "number of workers in the job"),
    ("PADDLE_TRAINER_ENDPOINTS", "launcher", None, "ip:port of every worker, comma separated, in rank order"),
    ("PADDLE_CURRENT_ENDPOINT", "launcher", None, "ip:port of this worker"),
    ("PADDLE_RANK_IN_NODE", "launcher", 0, "rank of this worker on its node"),
    ("PADDLE_LOCAL_RANK", "launcher", 0, "the same, newer name"),
    ("PADDLE_LOCAL_SIZE", "launcher", 1, "number of workers on this node"),
    ("PADDLE_GLOBAL_RANK", "launcher", 0, "rank of this worker in the job, newer name"),
    ("PADDLE_GLOBAL_SIZE", "launcher", 1, "number of workers in the job, newer name"),
    ("PADDLE_NNODES", "launcher", None, "number of nodes, N or MIN:MAX"),
    ("PADDLE_MASTER", "launcher", None, "ip:port where the workers meet"),
    ("PADDLE_LOCAL_DEVICE_IDS", "launcher", None, "device ids of this worker"),
    ("PADDLE_WORLD_DEVICE_IDS", "launcher", None, "device ids of every worker"),
    ("PADDLE_DISTRI_BACKEND", "launcher", None, "process-group backend: gloo or nccl"),
    ("PADDLE_BACKUP_ENV_PATH", "launcher", None, "JSON file that holds variables too long for the environment"),
    ("PADDLE_LOG_DIR", "launcher", "log", "folder of the log files"),
    ("PADDLE_JOB_ID", "user", "default", "name that keeps jobs apart"),
    ("POD_NAME", "launcher", None, "name of the pod (node) in logs"),
    ("FLAGS_selected_gpus", "launcher", None, "device index of this worker"),
    ("PADDLE_PG_TIMEOUT", "user", 1800000, "process-group timeout in milliseconds"),
    ("FLAGS_stop_check_timeout", "user", 900, "seconds to wait for the peers at start"),
    # Parameter-server roles.
    ("TRAINING_ROLE", "launcher", None, "TRAINER, PSERVER, HETER_TRAINER or COORDINATOR"),
    ("PADDLE_TRAINING_ROLE", "launcher", None, "the same, older name"),
    ("PADDLE_ROLE", "launcher", None, "the same, newer name"),
    ("PADDLE_PSERVERS_IP_PORT_LIST", "launcher", None, "ip:port of every server; absent: not a PS job"),
    ("POD_IP", "launcher", None, "address of this node"),
    ("PADDLE_PORT", "launcher", None, "port of this server (or first port of this node)"),
    ("PADDLE_TRAINERS", "scheduler", None, "hosts of the workers"),
    ("PADDLE_WITH_GLOO", "launcher", 0, "0 off, 1 workers, 2 workers and servers"),
    ("PADDLE_GLOO_RENDEZVOUS", "launcher", 3, "1 HDFS, 2 file, 3 HTTP"),
    ("PADDLE_GLOO_FS_PATH", "launcher", None, "folder of the file rendezvous"),
    ("PADDLE_GLOO_HTTP_ENDPOINT", "launcher", None, "ip:port of the HTTP rendezvous"),
    ("FLAGS_check_nan_inf", "user", 0, "1 names the module and rank where a NaN or Inf first appears, and stops"),
    ("CPU_NUM", "user", 1, "worker threads of the parameter server"),
    # torch's contract.
    ("RANK", "torch", 0, "rank of this process in the job"),
    ("WORLD_SIZE", "torch", 1, "number of processes in the job"),
    ("LOCAL_RANK", "torch", 0, "rank of this process on its node"),
    ("LOCAL_WORLD_SIZE", "torch", 1, "number of processes on this node"),
    ("GROUP_RANK", "torch", 0, "rank of this node"),
    ("MASTER_ADDR", "torch", None, "address of the process-group store"),
    ("MASTER_PORT", "torch", None, "port of the process-group store"),
    ("TORCHELASTIC_RESTART_COUNT", "torch", 0, "how often the group was restarted"),
    ("TORCHELASTIC_RUN_ID", "torch", None, "id of the job under torchrun"),
    ("TORCHELASTIC_USE_AGENT_STORE", "torch", None, "True when the launcher already serves the store"),
    ("CUDA_VISIBLE_DEVICES", "user", None, "devices that this process may see"),
    ("OMP_NUM_THREADS", "user", None, "CPU threads of each process"),
    # Other starters.
    ("SLURM_PROCID", "scheduler", None, "rank under srun"),
    ("SLURM_NTASKS", "scheduler", None, "number of processes under srun"),
    ("SLURM_LOCALID", "scheduler", None, "rank on the node under srun"),
    ("SLURM_STEP_NODELIST", "scheduler", None, "nodes of the srun step"),
    ("SLURM_JOB_ID", "scheduler", None, "Slurm job number"),
    ("SLURM_STEP_TASKS_PER_NODE", "scheduler", None, "processes on each node under srun"),
    ("OMPI_COMM_WORLD_RANK", "scheduler", None, "rank under Open MPI's mpirun"),
    ("OMPI_COMM_WORLD_SIZE", "scheduler", None, "number of processes under Open MPI"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "scheduler", None, "rank on the node under Open MPI"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "scheduler", None, "processes on the node under Open MPI"),
    ("PMI_RANK", "scheduler", None, "rank under MPICH or Intel MPI"),
    ("PMI_SIZE", "scheduler", None, "number of processes under MPICH or Intel MPI"),
    ("MPI_LOCALRANKID", "scheduler", None, "rank on the node under Intel MPI"),
)
