"""Trackers by name: wrong names, packages that are missing, and classes of other packages."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from fleet.common import tracker_names as names_module
from fleet.common.tracker_names import tracker_names
from fleet.errors import ConfigError
from fleet.trackers import Tracker
from fleet.trackers.json_tracker import JsonTracker
from fleet.trackers.named_trackers import make_tracker


class Console(Tracker):
    """What another package declares."""


class NoTracker:
    """Some other class."""


class Broken(Tracker):
    """One that cannot be made."""

    def __init__(self) -> None:
        raise OSError("no server")


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three entry points of other packages."""
    points = [
        importlib.metadata.EntryPoint(name, f"{__name__}:{kind}", "fleet.trackers")
        for name, kind in (("console", "Console"), ("broken", "Broken"), ("none", "NoTracker"))
    ]
    monkeypatch.setattr(names_module, "entry_points", lambda group: points if group == "fleet.trackers" else [])


def test_a_tracker_of_this_package() -> None:
    assert isinstance(make_tracker("json", "strategy.trackers"), JsonTracker)


@pytest.mark.usefixtures("declared")
def test_trackers_of_other_packages() -> None:
    assert {"console", "json"} <= set(tracker_names())
    assert isinstance(make_tracker("console", "x"), Console)
    for name, expected in (("broken", "cannot be made.*OSError: no server"), ("none", "no subclass of")):
        with pytest.raises(ConfigError, match=expected):
            make_tracker(name, "x")


def test_a_tracker_says_what_it_writes() -> None:
    tracker: Any = Console()
    with pytest.raises(NotImplementedError):
        tracker.log({}, 0)
