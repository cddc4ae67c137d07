"""python -m fleet run_check."""

from __future__ import annotations

import pytest

from fleet.utils import _run_check


def test_it_runs_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """000-01: the command is the function."""
    calls: list[int] = []
    monkeypatch.setattr(_run_check, "run_check", lambda: calls.append(1))
    assert _run_check.run([]) == 0
    assert calls == [1]


def test_it_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        _run_check.run(["--gpus=0"])
    assert caught.value.code == 2
    assert "unrecognized" in capsys.readouterr().err
