"""Refuses a Python or torch that the package does not work with, when it is imported and not later.

docs/reference/compatibility.md has the versions that were tested. torch is not imported for this: the launcher starts
without it.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 11)
_PAGE = "docs/reference/compatibility.md lists the versions that were tested"


def check_compatibility() -> None:
    """Raises ImportError that names a Python or torch older than the oldest supported one.

    Where torch is loaded already, its own version counts; without torch nothing is refused.
    """
    check_python(tuple(sys.version_info[:2]))
    found = torch_version()
    if found is not None:
        check_torch(found)


def check_python(found: tuple[int, ...]) -> None:
    """Raises ImportError where Python ``found`` is too old."""
    if found < OLDEST_PYTHON:
        raise ImportError(
            f"fleet runs on Python {_dotted(OLDEST_PYTHON)} or newer, and this is Python {_dotted(found)} "
            f"({sys.executable}). Make an environment with a newer one; {_PAGE}."
        )


def check_torch(found: str) -> None:
    """Raises ImportError where torch ``found`` is too old; what is no version number is taken as it is."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST_TORCH:
        oldest = _dotted(OLDEST_TORCH)
        raise ImportError(
            f"fleet works with torch {oldest} or newer, and torch {found} is installed ({sys.executable}). "
            f"Run pip install 'torch>={oldest}'; {_PAGE}."
        )


def torch_version() -> str | None:
    """Returns the version of torch that is loaded or would be; None without torch."""
    loaded: Any = sys.modules.get("torch")
    if loaded is not None and hasattr(loaded, "__version__"):
        return str(loaded.__version__)
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
