"""Guard: the newest rows fall below the best version, and readers go back to it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet import ps
from fleet.errors import ConfigError
from fleet.ps.publishing.folder_sink import FolderSink
from fleet.ps.publishing.versions import Mark, read_brake
from tests.fleet.ps.serving.deltas import DIM, IDS, Chain


class Rows:
    """A folder whose rows are all one number, which is the metric."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sink = FolderSink(folder, "shop", "float32")
        self.chain = Chain(self.sink)

    def write(self, value: float, version: str = "") -> None:
        values = np.full((len(IDS), DIM), value, np.float32)
        self.chain.put(0, IDS, values, IDS[:0], whole=not self.chain.rows)
        if version:
            self.sink.mark(0, Mark(version, version, 5))


def metric(reader: ps.Reader) -> float:
    return float(reader.lookup("ads", [7])[0, 0])


@pytest.fixture
def rows(tmp_path: Path) -> Rows:
    made = Rows(tmp_path)
    made.write(0.70, "monday")
    made.write(0.80, "tuesday")
    made.write(0.78, "wednesday")
    return made


def test_a_fall_beyond_the_drop_goes_back_to_the_best_version(rows: Rows, caplog: pytest.LogCaptureFixture) -> None:
    called: list[Any] = []
    guard = ps.guard(metric, 0.05, rows.folder, on_roll_back=lambda *facts: called.append(facts))
    assert guard.check() is None
    assert guard.scores == pytest.approx({"monday": 0.70, "tuesday": 0.80, "wednesday": 0.78})
    rows.write(0.7501)
    assert guard.check() is None
    rows.write(0.7499)
    with caplog.at_level(logging.WARNING, "FLEET"):
        found = guard.check()
    assert found is not None
    assert found.name == "tuesday" == read_brake(rows.folder)
    assert "the newest rows have 0.7499, version 'tuesday' has 0.8, which is more than 0.05 above" in caplog.text
    assert called == [(found, pytest.approx(0.7499), pytest.approx(0.8))]
    assert metric(ps.Reader(rows.folder)) == pytest.approx(0.8)


def test_under_a_brake_it_does_nothing_and_a_release_too_early_is_taken_back(rows: Rows) -> None:
    calls: list[float] = []
    guard = ps.guard(lambda reader: calls.append(1) or metric(reader), 0.05, rows.folder)
    ps.roll_back(rows.folder, "monday")
    rows.write(0.1)
    assert guard.check() is None
    assert not calls
    assert read_brake(rows.folder) == "monday"
    ps.release(rows.folder)
    assert guard.check() is not None
    assert read_brake(rows.folder) == "tuesday"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_metric_that_is_not_finite_is_a_fall(rows: Rows, value: float, caplog: pytest.LogCaptureFixture) -> None:
    rows.write(value)
    with caplog.at_level(logging.WARNING, "FLEET"):
        found = ps.guard(metric, 0.05, rows.folder).check()
    assert found is not None
    assert found.name == "tuesday"
    assert f"have {value:g}, version 'tuesday' has 0.8, which is finite" in caplog.text


def test_a_metric_that_is_finite_for_no_version_is_said_once(rows: Rows, caplog: pytest.LogCaptureFixture) -> None:
    guard = ps.guard(lambda reader: float("nan"), 0.05, rows.folder)
    with caplog.at_level(logging.WARNING, "FLEET"):
        assert [guard.check(), guard.check()] == [None, None]
    assert caplog.text.count("the metric is finite for no version ('monday': nan, 'tuesday': nan") == 1
    assert read_brake(rows.folder) is None


def test_a_version_that_is_not_finite_is_never_the_best(rows: Rows) -> None:
    rows.write(float("inf"), "thursday")
    found = ps.guard(metric, 0.05, rows.folder).check()
    assert found is not None
    assert found.name == "tuesday"


def test_without_a_version_it_has_nowhere_to_go(tmp_path: Path) -> None:
    made = Rows(tmp_path)
    made.write(float("nan"))
    assert ps.guard(metric, 0.0, tmp_path).check() is None
    assert read_brake(tmp_path) is None


def test_held_out_samples_that_became_harder_are_no_fall(rows: Rows) -> None:
    """The versions are scored again on the same samples before readers go back."""
    hardness = 0.0
    guard = ps.guard(lambda reader: metric(reader) - hardness, 0.05, rows.folder)
    assert guard.check() is None
    hardness = 0.3
    assert guard.check() is None
    assert guard.scores["tuesday"] == pytest.approx(0.5)
    rows.write(0.7)
    assert guard.check() is not None


def test_newest_rows_are_not_judged_by_samples_that_versions_do_not_see(rows: Rows) -> None:
    """A day's samples give way to harder ones after the newest rows were scored: these have fallen all the same."""
    calls: list[float] = []

    def harder_after_five_calls(reader: ps.Reader) -> float:
        calls.append(metric(reader))
        return calls[-1] - (0.1 if len(calls) > 5 else 0.0)

    guard = ps.guard(harder_after_five_calls, 0.05, rows.folder)
    assert guard.check() is None
    assert len(calls) == 4
    rows.write(0.74)
    assert guard.check() is not None  # 0.64 against 0.7; 0.74 against 0.7 would be none


def test_a_metric_that_fails_decides_nothing(rows: Rows) -> None:
    def failing(reader: ps.Reader) -> float:
        raise OSError("the held-out stream is away")

    rows.write(0.0)
    with pytest.raises(OSError, match="stream is away"):
        ps.guard(failing, 0.05, rows.folder).check()
    with pytest.raises(ConfigError, match="returned None; it returns a number, the higher the better"):
        ps.guard(lambda reader: None, 0.05, rows.folder).check()
    with pytest.raises(ConfigError, match="returned '0.5'; it returns a number"):
        ps.guard(lambda reader: "0.5", 0.05, rows.folder).check()
    assert read_brake(rows.folder) is None


def test_follow_checks_until_close_and_survives_errors(rows: Rows, caplog: pytest.LogCaptureFixture) -> None:
    went_back = threading.Event()
    failures = [OSError("the held-out stream is away")] * 3

    def sometimes(reader: ps.Reader) -> float:
        if failures:
            raise failures.pop()
        return metric(reader)

    rows.write(0.1)
    with caplog.at_level(logging.WARNING, "FLEET"):
        guard = ps.guard(sometimes, 0.05, rows.folder, on_roll_back=lambda *_: went_back.set())
        with guard.follow(0.01):
            assert went_back.wait(30)
    assert read_brake(rows.folder) == "tuesday"
    assert caplog.text.count("this check failed: the held-out stream is away") == 1
    assert not any(thread.name == "fleet-guard" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("auc", 0.1), "metric is a function"),
        ((metric, -1), "takes a number from 0"),
        ((metric, float("nan")), "takes a number from 0"),
        ((metric, True), "takes a number from 0"),
    ],
)
def test_wrong_arguments_are_refused(rows: Rows, arguments: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        ps.guard(*arguments, rows.folder)
    with pytest.raises(ConfigError, match="takes the folder of fleet.ps.publish"):
        ps.guard(metric, 0.1, "redis://host/0")
    with pytest.raises(ConfigError, match="takes a number of seconds above 0"):
        ps.guard(metric, 0.1, rows.folder).follow(0)
