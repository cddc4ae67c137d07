"""Waiting for an exchange that was started: in one place, by which a worker that waits in C++ is recognised.

The stack of such a worker ends in Python's last frame; ``launch/processes/stacks.py`` knows this file.
"""

from __future__ import annotations

from typing import Any

__all__ = ["wait_for"]


def wait_for(work: Any) -> None:
    """Returns when ``work``, of a collective or a message that was started, is done; raises its error."""
    work.wait()
