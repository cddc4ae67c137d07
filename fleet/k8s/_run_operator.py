"""``python -m fleet.k8s operator``: reads the cluster's address and runs the handlers of ``fleet.k8s.operator``."""

from __future__ import annotations

import argparse

from fleet.errors import UnsupportedOptionError


def run_operator(arguments: argparse.Namespace) -> int:
    """Runs the operator until it is told to stop; returns the exit status.

    Raises UnsupportedOptionError when the extra is not installed.
    """
    try:
        import kopf  # noqa: F401
        import kubernetes  # noqa: F401
    except ImportError as error:
        raise UnsupportedOptionError(
            f"The operator needs the extra k8s ({error}). Install it with: pip install 'torch-fleet[k8s]'"
        ) from error
    raise UnsupportedOptionError("not yet")
