"""``python -m fleet launch-on slurm``: writes the batch script of a job, and submits it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fleet.common.plain_files import replace_file
from fleet.errors import ConfigError, LaunchError
from fleet.launch.cli.command_options import CommandOptions, check_set_flags, cut_options
from fleet.launch.cli.settings import parse_command_line

_FIRST_PORT = 20000
_PORTS = 10000
_PROGRAM = "python -m fleet launch-on slurm"
_ABOUT = """Writes NAME.sbatch, which starts one launcher on each node, and submits it with sbatch. Options of this
command come first, then the launcher's flags, the script and its arguments:

  python -m fleet launch-on slurm --nodes=2 --time=4:00:00 --sbatch=--gres=gpu:4 --nproc_per_node=4 train.py --epochs=3
"""
_TAKES_VALUE = ("--nodes", "--name", "--time", "--partition", "--account", "--sbatch", "--grace", "--python", "--to")
_SWITCHES = ("--requeue", "--dry_run", "--help", "-h")
# Options of sbatch that the script sets, and their replacement.
_OWN_OPTIONS = {
    "nodes": "--nodes of this command",
    "N": "--nodes of this command",
    "ntasks": "nothing: there is one task a node, a launcher, and --nproc_per_node says how many workers it starts",
    "n": "nothing: there is one task a node, a launcher, and --nproc_per_node says how many workers it starts",
    "ntasks-per-node": "--nproc_per_node of the launcher",
    "signal": "--grace of this command",
    "requeue": "--requeue of this command",
    "no-requeue": "nothing: that is the default",
    "job-name": "--name of this command",
    "J": "--name of this command",
    "wrap": "the script behind the flags",
}


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """The choices that the batch script is made from.

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
        # Each task puts its own node's number in; "$0" is the interpreter, "$@" the arguments behind it. Nodes
        # that share a file system have a folder of log files each.
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
    # Variables of an outer job, or of the shell that submits, describe that one and not the tasks of this job.
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


def run(argv: Sequence[str]) -> int:
    """Writes the batch script and submits it; returns sbatch's exit status, and with ``--dry_run`` 0.

    Raises:
        ConfigError: an option is wrong, or the script sets it itself.
        LaunchError: there is no sbatch here, or it refused the job.
    """
    own, launcher = cut_options(argv, _TAKES_VALUE, _SWITCHES)
    parser = _parser()
    if {"--help", "-h"} & {*own}:
        print(parser.format_help())
        return 0
    given = parser.parse_args(own)
    job = _job(given, launcher)
    text = batch_script(job)
    if given.dry_run:
        print(text, end="")
        return 0
    path = Path(given.to or f"{job.name}.sbatch")
    try:
        replace_file(path, text)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}. --to names another file.") from None
    return _submit(path)


def _parser() -> argparse.ArgumentParser:
    parser = CommandOptions(_PROGRAM, _ABOUT)
    add = parser.add_argument
    add("--nodes", type=int, default=1, help="number of nodes, one launcher on each (default 1)")
    add("--name", help="name of the job; default: that of the script")
    add("--time", help="time limit, as sbatch takes it")
    add("--partition", help="partition of the nodes")
    add("--account", help="account that is charged")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other option of sbatch; may be repeated")
    add("--grace", type=int, default=0, help="seconds before the time limit or a preemption in which workers save a "
        "checkpoint (fleet.elastic.Checkpoint) and exit with 75; 0: they are not asked (default 0)")  # fmt: skip
    add("--requeue", action="store_true", help="put a job whose workers have saved themselves back into the queue")
    add("--python", default=sys.executable, help="interpreter on the nodes (default: this one)")
    add("--to", metavar="FILE", help="where the batch script is written (default NAME.sbatch)")
    add("--dry_run", action="store_true", help="print the batch script; write and submit nothing")
    return parser


def _job(given: argparse.Namespace, launcher: list[str]) -> SlurmJob:
    line = parse_command_line(launcher, "python -m fleet.launch")
    if given.nodes < 1:
        raise ConfigError(f"--nodes is {given.nodes}; it takes at least 1.")
    if given.grace < 0:
        raise ConfigError(f"--grace is {given.grace}; it takes seconds, at least 0.")
    if given.requeue and not given.grace:
        raise ConfigError(
            "--requeue needs --grace=SECONDS: a job is put back when its workers have saved a checkpoint."
        )
    check_set_flags(
        line,
        given.nodes,
        sets="the batch script sets, from what Slurm gives the job",
        chooses="Slurm",
        number="--nodes",
        more={"preempt_grace": "Write --grace=SECONDS before the flags."},
    )
    name = given.name or re.sub(r"[^\w.-]", "_", Path(line.script).stem) or "fleet"
    if re.fullmatch(r"[\w.][\w.-]*", name) is None:
        raise ConfigError(
            f"--name is {name!r}; it takes letters, digits, '_', '.' and '-', and does not begin with '-', because it "
            "names files."
        )
    options = [
        _passed(key, value) for key in ("time", "partition", "account") if (value := getattr(given, key)) is not None
    ]
    options += [_checked(option) for option in given.sbatch]
    return SlurmJob(
        name=name,
        nodes=given.nodes,
        launcher=launcher,
        options=options,
        grace_s=given.grace,
        requeue=given.requeue,
        python=given.python,
        log_dir=line.flags.get("log_dir", ""),
    )


def _passed(key: str, value: str) -> str:
    """Returns an option for sbatch; raises ConfigError for a value that is no word on one line of the script."""
    if not value.strip() or len(value.splitlines()) > 1:
        raise ConfigError(f"--{key} is {value!r}; it takes one value, as sbatch does. Without one omit the option.")
    return f"--{key}={value}"


def _checked(option: str) -> str:
    """Returns an option of sbatch; raises ConfigError for a word that is none, or an option that the script sets."""
    name = option.lstrip("-").split("=")[0].split()[0] if option.startswith("-") and option.strip("- ") else ""
    if not option.startswith("--"):
        # The value may follow a letter without a space, as in -N3.
        name = name[:1]
    if not name or len(option.splitlines()) > 1:
        raise ConfigError(f"--sbatch is {option!r}; it takes one option of sbatch, as in --sbatch=--gres=gpu:4.")
    if name in _OWN_OPTIONS:
        raise ConfigError(f"--sbatch={option}: the batch script sets that option. Write {_OWN_OPTIONS[name]}.")
    return option


def _submit(path: Path) -> int:
    if shutil.which("sbatch") is None:
        raise LaunchError(
            f"{path} is written, and there is no sbatch on this machine. Submit it where Slurm is: sbatch {path}"
        )
    done = subprocess.run(["sbatch", "--parsable", os.path.join(os.curdir, path)], capture_output=True, text=True)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise LaunchError(f"sbatch refused {path} with exit code {done.returncode}: {said}")
    number = done.stdout.strip().split(";")[0]
    print(
        f"Submitted job {number} with {path}. Its output: slurm-{number}.out; squeue --job {number}; scancel {number}"
    )
    return 0
