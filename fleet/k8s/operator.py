"""The operator for ``kopf run -m fleet.k8s.operator``, with kopf's own flags; all namespaces, no etcd.

``python -m fleet.k8s operator`` is the same operator with its own flags.
"""

from __future__ import annotations

import kopf

from fleet.k8s.handlers import Options, register

register(kopf.get_default_registry(), Options())
