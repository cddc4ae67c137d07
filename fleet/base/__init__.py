"""The path of the role makers in older scripts: ``fleet.base.role_maker``."""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

__all__ = ["role_maker"]

__getattr__, __dir__ = lazy_names(__name__, {}, __all__)
