"""``python -m fleet.k8s``: translate a PaddleJob, check it, or run the operator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fleet.errors import ConfigError, FleetError
from fleet.k8s._paddle_job import PaddleJob, read_job
from fleet.k8s._render import TARGETS, render
from fleet.k8s._yaml import read_documents, write_documents


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that ``argv`` names and returns its exit status; 2 for a wrong job."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "operator":
            from fleet.k8s._run_operator import run_operator

            check_etcd_server(arguments.etcd_server)
            return run_operator(arguments)
        jobs = read_file(arguments.file)
        if arguments.command == "check":
            print("\n".join(f"{job.name}: {job.mode}" for job in jobs))
            return 0
        return _render(jobs, arguments.to, arguments.etcd_server)
    except FleetError as error:
        print(f"fleet.k8s {arguments.command}: {error}", file=sys.stderr)
        return 2


def read_file(path: str) -> list[PaddleJob]:
    """Returns the jobs of a YAML file, which may hold several documents; ``-`` is standard input."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text ({error.reason} at {error.start}).") from error
    documents = read_documents(text, path)
    if not documents:
        raise ConfigError(f"{path} holds no document; it must hold a PaddleJob.")
    jobs = []
    for number, document in enumerate(documents, 1):
        try:
            jobs.append(read_job(document))
        except FleetError as error:
            where = f"{path}, document {number} of {len(documents)}: " if len(documents) > 1 else ""
            raise type(error)(f"{where}{error}") from error
    return jobs


def _render(jobs: Sequence[PaddleJob], target: str, etcd_server: str | None) -> int:
    check_etcd_server(etcd_server)
    if etcd_server is not None and not any(job.is_elastic for job in jobs):
        raise ConfigError(f"--etcd-server is {etcd_server!r}, and no job in the file has elastic: 1. Omit it.")
    rendered = [render(job, target, etcd_server) for job in jobs]
    documents = [document for one in rendered for document in one.documents]
    sys.stdout.write(write_documents(documents))
    for note in dict.fromkeys(note for one in rendered for note in one.notes):
        print(f"note: {note}", file=sys.stderr)
    return 0


def check_etcd_server(text: str | None) -> None:
    """Raises ConfigError when ``--etcd-server`` is not an address of etcd."""
    if text is not None:
        from fleet.env import Environment
        from fleet.launch.membership.etcd_address import read_etcd_address

        read_etcd_address(text, Environment(), "--etcd-server")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fleet.k8s", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("render", "print a PaddleJob as another kind"),
        ("check", "say what is wrong with a PaddleJob"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("file", help="YAML file with PaddleJobs, or - for standard input")
        if name == "render":
            command.add_argument("--to", required=True, metavar="KIND", help=", ".join(TARGETS))
            command.add_argument("--etcd-server", metavar="HOST:PORT", help="etcd of an elastic job")
    operator = commands.add_parser("operator", help="run the operator (extra k8s)", allow_abbrev=False)
    operator.add_argument("--namespace", help="watch one namespace; without it, all")
    operator.add_argument("--etcd-server", metavar="HOST:PORT", help="etcd of elastic jobs; their pods get it too")
    operator.add_argument("--kubeconfig", help="kubeconfig file of the cluster; without it, the pod's account")
    operator.add_argument("--liveness", metavar="ADDRESS:PORT", help="where the health check listens, at /healthz")
    return parser


if __name__ == "__main__":
    sys.exit(main())
