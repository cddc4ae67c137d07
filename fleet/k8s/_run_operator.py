"""``python -m fleet.k8s operator``: runs the handlers of ``fleet.k8s._handlers`` until it is told to stop."""

from __future__ import annotations

import argparse
from pathlib import Path

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.k8s._job import is_label


def run_operator(arguments: argparse.Namespace) -> int:
    """Runs the operator until a signal comes; returns the exit status.

    Raises:
        ConfigError: ``--liveness`` is not an address and a port, ``--namespace`` no name, ``--kubeconfig`` no file.
        UnsupportedOptionError: the extra is not installed.
    """
    liveness = liveness_url(arguments.liveness)
    if arguments.namespace is not None and not is_label(arguments.namespace):
        raise ConfigError(
            f"--namespace is {arguments.namespace!r}; it takes the name of a namespace: lower-case letters, digits and "
            "'-'. Leave it out to watch all."
        )
    if arguments.kubeconfig is not None and not Path(arguments.kubeconfig).is_file():
        raise ConfigError(f"--kubeconfig is {arguments.kubeconfig!r}; no such file exists.")
    try:
        import kopf

        from fleet.k8s._handlers import Options, register
    except ImportError as error:
        raise UnsupportedOptionError(
            f"The operator needs the extra k8s ({error}). Install it with: pip install 'torch-fleet[k8s]'"
        ) from error
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
    """Returns where the health check listens, of ``address:port``; raises ConfigError for other text."""
    if text is None:
        return None
    address, _, port = text.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--liveness is {text!r}; it takes address:port, the address being one of this pod.")
    return f"http://{text}/healthz"
