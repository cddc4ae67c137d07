"""The names of trackers, and whether their packages are installed; nothing of a tracker is imported."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from fleet.common.extras import install_line
from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean

__all__ = ["TRACKERS", "check_trackers", "entry_of", "is_own", "not_installed", "tracker_names"]

_GROUP = "fleet.trackers"  # of entry points

# Name -> module and class, the package that it needs, and the extra that installs that.
TRACKERS = {
    "csv": ("fleet.trackers.csv_tracker:CsvTracker", "", ""),
    "json": ("fleet.trackers.json_tracker:JsonTracker", "", ""),
    "mlflow": ("fleet.trackers.mlflow_tracker:MlflowTracker", "mlflow", "mlflow"),
    "tensorboard": ("fleet.trackers.tensorboard_tracker:TensorboardTracker", "tensorboard", "tensorboard"),
    "trackio": ("fleet.trackers.trackio_tracker:TrackioTracker", "trackio", "trackio"),
    "wandb": ("fleet.trackers.wandb_tracker:WandbTracker", "wandb", "wandb"),
}


def tracker_names() -> list[str]:
    """Returns the name of every tracker."""
    return sorted({*TRACKERS, *(entry.name for entry in entry_points(group=_GROUP))})


def is_own(name: str) -> bool:
    """Returns whether ``name`` is a tracker of this package; all of these write on worker 0 alone."""
    return name in TRACKERS


def check_trackers(asked: Mapping[str, str]) -> None:
    """Raises unless each of ``asked`` is the name of a tracker whose package is installed; imports none of them.

    Args:
        asked: the trackers, and where the user wrote them, for messages.

    Raises:
        ConfigError: there is no such tracker.
        UnsupportedOptionError: the package that it needs is not installed.
    """
    for name, origin in asked.items():
        if name not in TRACKERS:
            entry_of(name, origin)
        elif (package := TRACKERS[name][1]) and find_spec(package) is None:
            raise not_installed(name, origin, f"no module named {package!r}")


def entry_of(name: str, origin: str) -> EntryPoint:
    """Returns where another package declares the tracker; raises ConfigError where none does."""
    entry = next((each for each in entry_points(group=_GROUP) if each.name == name), None)
    if entry is None:
        known = tracker_names()
        raise ConfigError(f"{origin} names {name!r}; it takes some of {known}.{did_you_mean(name, known)}")
    return entry


def not_installed(name: str, origin: str, reason: str) -> UnsupportedOptionError:
    """Returns the error about a tracker whose package is absent."""
    extra = TRACKERS[name][2]
    return UnsupportedOptionError(
        f"{origin} names {name!r}, which needs the extra {extra} ({reason}); {install_line(extra)}, or name "
        f"another one of {tracker_names()}."
    )
