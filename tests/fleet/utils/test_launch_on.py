"""python -m fleet launch-on: the places that it knows."""

from __future__ import annotations

import pytest

from fleet.__main__ import main


@pytest.mark.parametrize("arguments", [[], ["kubernetes", "t.py"]])
def test_other_schedulers_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch-on", *arguments]) == 2
    assert "launch-on takes slurm or ray" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch-on", "--help"]) == 0
    assert "launch-on {ray,slurm}" in capsys.readouterr().out
    for place, option in (("slurm", "--grace"), ("ray", "--working_dir")):
        assert main(["launch-on", place, "--help"]) == 0
        assert option in capsys.readouterr().out
