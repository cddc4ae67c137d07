"""The batch script of a job: one launcher a node, started by srun.

[Note: A job of Slurm]
srun starts one task on each node, a launcher, and the launchers find each other at a port of the first node that comes
from the number of the job. Slurm sends SIGTERM to the launchers (not to the batch shell) before the time limit, when
the job is preempted and on scancel; with --grace each asks its workers to save a checkpoint, which they do when the
script uses fleet.elastic.Checkpoint, and exits with 75. With --requeue the batch shell then puts the job back into the
queue under the same number.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

_FIRST_PORT = 20000
_PORTS = 10000


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What the batch script is made from.

    Attributes:
        name: of the job.
        nodes: how many.
        launcher: flags of the launcher, the script and its arguments.
        options: further options of sbatch, as ``--name=value``.
        grace_s: seconds before the end in which workers save a checkpoint; 0: they are not asked.
        requeue: whether a job that has saved itself goes back into the queue.
        python: of the nodes.
        log_dir: folder of the log files; empty for one by the numbers of job and node.
    """

    name: str
    nodes: int
    launcher: Sequence[str]
    options: Sequence[str] = field(default=())
    grace_s: int = 0
    requeue: bool = False
    python: str = "python"
    log_dir: str = ""


def batch_script(job: SlurmJob) -> str:
    """Returns the text of the batch script; arguments reach the script as they were given."""
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *job.options,
    ]
    if job.grace_s:
        options.append(f"--signal=TERM@{job.grace_s}")
    options.append("--requeue" if job.requeue else "--no-requeue")
    flags = []
    if job.grace_s:
        flags.append(f"--preempt_grace={job.grace_s}")
    if job.nodes > 1:
        # Each task puts its own node's number in; "$0" is the interpreter, "$@" what follows. Nodes that share a file
        # system have a folder of log files each.
        own = "" if job.log_dir else ' --log_dir="log/slurm-$SLURM_JOB_ID/node-$SLURM_NODEID"'
        rank = f'"$0" -m fleet.launch --rank="$SLURM_NODEID"{own} "$@"'
        start = f"bash -c {shlex.quote(f'exec {rank}')} {shlex.quote(job.python)}"
        flags = [f"--nnodes={job.nodes}", '"--master=$first:$port"', '"--job_id=slurm-$SLURM_JOB_ID"', *flags]
    else:
        start = f"{shlex.quote(job.python)} -m fleet.launch"
        if not job.log_dir:
            flags.append('"--log_dir=log/slurm-$SLURM_JOB_ID"')
        flags = ['"--job_id=slurm-$SLURM_JOB_ID"', "--standalone", *flags]
    command = " ".join([start, *flags, *map(shlex.quote, job.launcher)])
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", *_variables(job), f"srun {command}"]
    lines += ["code=$?", *_ending(job), "exit $code", ""]
    return "\n".join(lines)


def _variables(job: SlurmJob) -> list[str]:
    # What an outer job, or the shell that submits, has set describes that one and not the tasks of this one.
    lines = ["unset ${!PADDLE_@} RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FLEET_POD"]
    # srun does not take this from sbatch by itself (since Slurm 22.05), and would give the launcher one core.
    lines.append('if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi')
    if job.nodes > 1:
        lines += [
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"port=$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))",
            "# The launchers prove to each other that they are of this job.",
            'if [ -z "${FLEET_JOB_SECRET:-}" ]; then',
            "    export FLEET_JOB_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            "fi",
        ]
    return lines


def _ending(job: SlurmJob) -> list[str]:
    if not job.requeue:
        return []
    return ["# 75: the workers have saved a checkpoint because they were asked to end.",
            'if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi']  # fmt: skip
