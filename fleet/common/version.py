"""The version of the package, for what must not import more than this."""

from __future__ import annotations

__version__ = "1.0.0"
