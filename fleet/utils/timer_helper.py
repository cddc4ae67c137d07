"""Refuses Fleet's timers: nothing here starts or stops them, so each would show 0."""

from __future__ import annotations

from typing import Any

from fleet.errors import UnsupportedOptionError

__all__ = ["get_timers", "set_timers"]


def get_timers() -> Any:
    """Refused; use torch.profiler.

    Raises:
        UnsupportedOptionError: always.
    """
    raise UnsupportedOptionError(
        "fleet.utils.timer_helper: no phase of a step starts or stops these timers, so each would show 0. Run the step "
        "under torch.profiler.profile(), which shows computation, transfers and waiting."
    )


def set_timers() -> None:
    """Refused, as :func:`get_timers`."""
    get_timers()
