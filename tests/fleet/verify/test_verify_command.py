"""The command line, and the report as text."""

from pathlib import Path

import pytest

from fleet.errors import ConfigError
from fleet.verify.report import Finding, Report
from fleet.verify.verify_command import run, text_of


def test_a_script_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="'nowhere.py' is not a file"):
        run(["nowhere.py"])


@pytest.mark.parametrize(
    ("option", "place", "said"),
    [
        ("--html", "nowhere/x.html", r"--html .*nowhere/x.html' lies in no folder"),
        ("--json", "nowhere/x.json", r"--json .*nowhere/x.json' lies in no folder"),
        ("--json", "", "--json .* is a folder"),
        ("--keep", "train.py/records", "--keep .*train.py/records': the folder cannot be made"),
    ],
)
def test_a_place_that_takes_no_report_is_refused_before_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    place: str,
    said: str,
) -> None:
    """``main`` makes code 2 of a ConfigError; any other error has that code too, as 1 says that the runs differ."""
    monkeypatch.setattr("fleet.verify.verify_command.compare_runs", lambda *given: 1 / 0)
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigError, match=said):
        run([option, str(tmp_path / place), str(script)])
    assert run(["--html", str(tmp_path / "x.html"), str(script)]) == 2  # it trains
    said_last = capsys.readouterr().err.splitlines()[-1]
    assert said_last.startswith("fleet verify itself failed at fleet/verify/verify_command.py:")
    assert "ZeroDivisionError: division by zero. This is no mistake" in said_last
    # A report among the records.
    assert run(["--keep", str(tmp_path / "a" / "b"), "--json", str(tmp_path / "a" / "b" / "x.json"), str(script)]) == 2
    (tmp_path / "a" / "b" / "many").mkdir()
    with pytest.raises(ConfigError, match="--keep .* holds the runs of an earlier call"):
        run(["--keep", str(tmp_path / "a" / "b"), str(script)])


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_time_limit_without_time_is_refused(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--timeout", seconds, "train.py"]) == 2
    assert f"'{seconds}'; it takes a number of seconds above 0" in capsys.readouterr().err


def test_the_text_names_the_first_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("loss.backward()\n")
    finding = Finding(cause="gradients-summed", sentence="Twice.", step=1, where=f"{script}:1")
    text = text_of(Report(outcome="differs", steps=2, workers=2, tolerance={"text": ""}, findings=[finding]))
    assert text.splitlines()[:2] == ["DIFFERS: 2 updates on 2 workers and on one process", "First difference: Twice."]
    assert text.splitlines()[2] == "  line       train.py:1 `loss.backward()`"
