"""The trackers by name: this package's own, and those of other packages' entry points."""

from __future__ import annotations

from importlib import import_module

from fleet.common.tracker_names import TRACKERS, entry_of, is_own, not_installed
from fleet.errors import ConfigError
from fleet.trackers.tracker import Tracker


def make_tracker(name: str, origin: str) -> Tracker:
    """Returns a tracker, not started; raises as :func:`check_trackers` does, and for faults in its code."""
    if is_own(name):
        module, _, kind = TRACKERS[name][0].partition(":")
        try:
            made: Tracker = getattr(import_module(module), kind)()
        except ImportError as error:
            raise not_installed(name, origin, f"{error}") from None
        return made
    entry = entry_of(name, origin)
    home = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "a package"
    try:
        found = entry.load()()
    except Exception as error:  # whatever the code of another package raises
        raise ConfigError(
            f"{origin} names {name!r}, which {home} declares as '{entry.value}', and it cannot be made "
            f"({type(error).__name__}: {error}). Repair that package, or omit the name."
        ) from error
    if not isinstance(found, Tracker):
        raise ConfigError(
            f"{origin} names {name!r}, which {home} declares as '{entry.value}'; that is no subclass of "
            "fleet.trackers.Tracker."
        )
    return found
