"""Names of trackers: wrong ones, and packages that are missing."""

from __future__ import annotations

import pytest

from fleet.common import tracker_names as tracker_names_module
from fleet.common.tracker_names import check_trackers, tracker_names
from fleet.errors import ConfigError, UnsupportedOptionError


def test_names() -> None:
    assert set(tracker_names()) >= {"csv", "json", "mlflow", "tensorboard", "trackio", "wandb"}
    check_trackers(dict.fromkeys(tracker_names(), "strategy.trackers"))  # all are installed in development


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.trackers names 'tensorbord'.*Did you mean 'tensorboard'"):
        check_trackers({"json": "x", "tensorbord": "strategy.trackers"})


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_names_module, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOptionError, match=r"'wandb', which needs the extra wandb.*'\.\[wandb\]'"):
        check_trackers({"wandb": "strategy.trackers"})
    check_trackers({"csv": "strategy.trackers"})
