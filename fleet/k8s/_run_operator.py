"""``python -m fleet.k8s operator``: runs the handlers of ``fleet.k8s._handlers`` until it is stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.k8s._paddle_job import is_label


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
    """Returns where the health check listens, from ``address:port``; raises ConfigError for other text."""
    if text is None:
        return None
    address, _, port = text.rpartition(":")
    if not address or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--liveness is {text!r}; it takes address:port, with an address of this pod.")
    return f"http://{text}/healthz"
