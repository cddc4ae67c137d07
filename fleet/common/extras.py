"""How an extra of the package is installed, as messages say it; imports nothing."""

from __future__ import annotations


def install_line(extra: str) -> str:
    """Returns what to run for the packages of an extra. The package is on no index, so it installs from a clone.

    Example:
        >>> install_line("migrate")
        "run `pip install '.[migrate]'` in the clone of torch-fleet"
    """
    return f"run `pip install '.[{extra}]'` in the clone of torch-fleet"
