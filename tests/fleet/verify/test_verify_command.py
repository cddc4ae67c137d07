"""The command line, and the report as text."""

import pytest

from fleet.errors import ConfigError
from fleet.verify.report import Finding, Report
from fleet.verify.verify_command import run, text_of


def test_a_script_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nowhere.py' is no file"):
        run(["nowhere.py"])


def test_the_text_names_the_first_difference() -> None:
    finding = Finding(cause="gradients-summed", sentence="Twice.", step=1, where="train.py:3")
    text = text_of(Report(outcome="differs", steps=2, workers=2, tolerance={"text": ""}, findings=[finding]))
    assert text.splitlines()[:2] == ["DIFFERS: 2 updates on 2 workers and on one process", "First difference: Twice."]
    assert "train.py:3" in text
