"""``fleet.incubate``: Fleet's path to layers of experts; what else it held is in the ``fleet`` package itself."""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

__all__ = ["distributed"]

__getattr__, __dir__ = lazy_names(__name__, {}, __all__)
