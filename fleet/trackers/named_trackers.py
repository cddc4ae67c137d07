"""The trackers by name: this package's own, and those of other packages' entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from fleet.errors import ConfigError, UnsupportedOptionError, did_you_mean
from fleet.trackers.tracker import Tracker

GROUP = "fleet.trackers"  # of entry points

# Name -> module and class, the package that it needs, and the extra that installs that.
_OWN = {
    "csv": ("fleet.trackers.csv_tracker:CsvTracker", "", ""),
    "json": ("fleet.trackers.json_tracker:JsonTracker", "", ""),
    "mlflow": ("fleet.trackers.mlflow_tracker:MlflowTracker", "mlflow", "mlflow"),
    "tensorboard": ("fleet.trackers.tensorboard_tracker:TensorboardTracker", "tensorboard", "tensorboard"),
    "trackio": ("fleet.trackers.trackio_tracker:TrackioTracker", "trackio", "trackio"),
    "wandb": ("fleet.trackers.wandb_tracker:WandbTracker", "wandb", "wandb"),
}


def tracker_names() -> list[str]:
    """Returns the name of every tracker."""
    return sorted({*_OWN, *(entry.name for entry in entry_points(group=GROUP))})


def is_own(name: str) -> bool:
    """Returns whether ``name`` is a tracker of this package; all of these write on worker 0 alone."""
    return name in _OWN


def check_trackers(asked: Mapping[str, str]) -> None:
    """Raises unless each of ``asked`` is the name of a tracker whose package is installed; imports none of them.

    Args:
        asked: the trackers, and where the user wrote them, for messages.

    Raises:
        ConfigError: there is no such tracker.
        UnsupportedOptionError: the package that it needs is not installed.
    """
    for name, origin in asked.items():
        if name not in _OWN:
            _entry_of(name, origin)
        elif (package := _OWN[name][1]) and find_spec(package) is None:
            raise _not_installed(name, origin, f"no module named {package!r}")


def make_tracker(name: str, origin: str) -> Tracker:
    """Returns a tracker, not started; raises as :func:`check_trackers` does, and for faults in its code."""
    if name in _OWN:
        module, _, kind = _OWN[name][0].partition(":")
        try:
            made: Tracker = getattr(import_module(module), kind)()
        except ImportError as error:
            raise _not_installed(name, origin, f"{error}") from None
        return made
    entry = _entry_of(name, origin)
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


def _entry_of(name: str, origin: str) -> EntryPoint:
    entry = next((each for each in entry_points(group=GROUP) if each.name == name), None)
    if entry is None:
        known = tracker_names()
        raise ConfigError(f"{origin} names {name!r}; it takes some of {known}.{did_you_mean(name, known)}")
    return entry


def _not_installed(name: str, origin: str, reason: str) -> UnsupportedOptionError:
    extra = _OWN[name][2]
    return UnsupportedOptionError(
        f"{origin} names {name!r}, which needs the extra {extra} ({reason}). Install it with: pip install "
        f"'torch-fleet[{extra}]', or name another one of {tracker_names()}."
    )
