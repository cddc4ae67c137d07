"""python -m fleet launch-on ray: its options reach the call."""

from __future__ import annotations

from typing import Any

import pytest

from fleet.errors import ConfigError, LaunchError
from fleet.integrations import _ray_command
from fleet.integrations._ray_command import run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(_ray_command, "launch", lambda script, **given: found.append({"script": script, **given}))
    return found


def test_the_options_reach_the_call(calls: list[dict[str, Any]]) -> None:
    assert run(
        ["--nodes", "2", "--nproc-per-node=4", "--resource=CPU=8", "--resource", "GPU=4", "--strategy=PACK",
         "--env=A=b=c", "--address=auto", "--working-dir=.", "--timeout=5", "--max_restart", "3", "train.py",
         "--nodes=1"]
    ) == 0  # fmt: skip
    assert calls == [
        {
            "script": "train.py",
            "args": ("--nodes=1",),
            "nodes": 2,
            "nproc_per_node": 4,
            "resources_per_node": {"CPU": 8.0, "GPU": 4.0},
            "placement_strategy": "PACK",
            "flags": ["--max_restart", "3"],
            "env": {"A": "b=c"},
            "address": "auto",
            "working_dir": ".",
            "timeout_s": 5.0,
        }
    ]
    run(["--", "-strange.py", "train.py"])
    assert (calls[1]["script"], calls[1]["args"], calls[1]["flags"]) == ("-strange.py", ("train.py",), [])
    assert calls[1]["resources_per_node"] is None


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--nodes=x", "t.py"], "--nodes.*invalid int value"),
        (["--resource=CPU", "t.py"], "--resource is 'CPU'; it takes NAME=VALUE"),
        (["--resource=CPU=many", "t.py"], "--resource is 'CPU=many'; it takes NAME=NUMBER"),
        (["--env=A", "t.py"], "--env is 'A'"),
        (["--nodes=2"], "the script is missing"),
    ],
)
def test_what_is_refused(arguments: list[str], rule: str, calls: list[dict[str, Any]]) -> None:
    with pytest.raises(ConfigError, match=rule):
        run(arguments)
    assert calls == []


@pytest.mark.parametrize(("error", "code"), [(LaunchError("no", 7), 7), (KeyboardInterrupt(), 130)])
def test_the_exit_code(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **given: Any) -> None:
        raise error

    monkeypatch.setattr(_ray_command, "launch", fail)
    assert run(["train.py"]) == code
