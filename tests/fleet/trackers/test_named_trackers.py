"""Trackers by name: wrong names, packages that are missing, and classes of other packages."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.trackers import Tracker, named_trackers
from fleet.trackers.json_tracker import JsonTracker
from fleet.trackers.named_trackers import check_trackers, make_tracker, tracker_names


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
    monkeypatch.setattr(named_trackers, "entry_points", lambda group: points if group == "fleet.trackers" else [])


def test_names() -> None:
    assert set(tracker_names()) >= {"csv", "json", "mlflow", "tensorboard", "trackio", "wandb"}
    assert isinstance(make_tracker("json", "strategy.trackers"), JsonTracker)
    check_trackers(dict.fromkeys(tracker_names(), "strategy.trackers"))  # all are installed in development


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.trackers names 'tensorbord'.*Did you mean 'tensorboard'"):
        check_trackers({"json": "x", "tensorbord": "strategy.trackers"})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_trackers, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOptionError, match=r"'wandb', which needs the extra wandb.*torch-fleet\[wandb\]"):
        check_trackers({"wandb": "strategy.trackers"})
    check_trackers({"csv": "strategy.trackers"})


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
