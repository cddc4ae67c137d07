"""``python -m fleet.k8s``: translate a PaddleJob, check it, or run the operator."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fleet.common.command_text import plain_text
from fleet.common.extras import install_line
from fleet.common.limited_yaml import MAX_TEXT
from fleet.common.plain_files import read_small
from fleet.errors import ConfigError, FleetError, UnsupportedOptionError
from fleet.k8s.paddle_job import PaddleJob, is_label, read_job
from fleet.k8s.render import TARGETS, render
from fleet.k8s.yaml import read_documents, write_documents


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that ``argv`` names and returns its exit status; 2 for a wrong job."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "operator":
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


def run_operator(arguments: argparse.Namespace) -> int:
    """Runs the operator until a signal arrives; returns the exit status.

    Raises:
        ConfigError: ``--liveness``, ``--namespace`` or ``--kubeconfig`` is not an address and port, a name, or a file.
        UnsupportedOptionError: the extra is not installed.
    """
    liveness = liveness_url(arguments.liveness)
    if arguments.namespace is not None and not is_label(arguments.namespace):
        raise ConfigError(
            f"--namespace is {arguments.namespace!r}; it takes the name of a namespace: lower-case letters, digits and "
            "'-'. Omit it to watch all."
        )
    if arguments.kubeconfig is not None and not Path(arguments.kubeconfig).is_file():
        raise ConfigError(f"--kubeconfig is {arguments.kubeconfig!r}; no such file exists.")
    try:
        import kopf

        from fleet.k8s.handlers import Options, register
    except ImportError as error:
        raise UnsupportedOptionError(f"The operator needs the extra k8s ({error}); {install_line('k8s')}.") from error
    options = Options(namespace=arguments.namespace, etcd_server=arguments.etcd_server, kubeconfig=arguments.kubeconfig)
    registry = kopf.OperatorRegistry()
    register(registry, options)
    kopf.configure(verbose=False)
    kopf.run(
        registry=registry,
        standalone=True,
        clusterwide=options.namespace is None,
        namespaces=[options.namespace] if options.namespace else [],
        liveness_endpoint=liveness,
    )
    return 0


def liveness_url(text: str | None) -> str | None:
    """Returns where the health check listens, from ``address:port``; raises ConfigError for other text."""
    if text is None:
        return None
    address, _, port = text.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--liveness is {text!r}; it takes address:port, with an address of this pod.")
    return f"http://{text}/healthz"


def read_file(path: str) -> list[PaddleJob]:
    """Returns the jobs of a YAML file, which may hold several documents; ``-`` is standard input."""
    try:
        text = sys.stdin.read() if path == "-" else read_small(path, MAX_TEXT).decode()
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
    parser = argparse.ArgumentParser(prog="python -m fleet.k8s", description=plain_text(__doc__), allow_abbrev=False)
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
