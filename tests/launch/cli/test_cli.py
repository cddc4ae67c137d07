"""The command: exit codes, messages, what reaches the running half."""

from __future__ import annotations

import sys
import types

import pytest

import fleet
from fleet.env import Environment
from fleet.errors import LaunchError
from fleet.launch.cli.cli import main, program_name
from fleet.launch.plan.local_machine import Machine
from fleet.launch.plan.records import LaunchConfig
from tests.helpers.launching import SCRIPT


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[LaunchConfig]:
    """Replaces the running half; it would start processes."""
    configs: list[LaunchConfig] = []

    def run(config: LaunchConfig, environment: Environment) -> int:
        configs.append(config)
        if config.script.args == ("fail",):
            raise LaunchError("no", 77)
        return 5

    job = types.ModuleType("fleet.launch.job")
    job.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fleet.launch.job", job)
    return configs


def launch(*argv: str, env: dict[str, str] | None = None) -> int:
    return main(list(argv), env or {}, Machine())


def test_the_exit_code_is_the_jobs(ran: list[LaunchConfig]) -> None:
    """003-18."""
    assert launch("--gpus=0,1", SCRIPT) == 5
    assert ran[0].processes.num_workers == 2
    assert launch(SCRIPT, "fail") == 77


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--selected_gpus=0", SCRIPT), "unrecognized arguments: --selected_gpus=0 ("),
        (("--selected_gpus=0", SCRIPT), "--selected_gpus was removed: use --gpus"),
        (("--nnodess=2", SCRIPT), "Did you mean '--nnodes'"),
        ((), "the script is missing"),
        (("--nnodes=x", SCRIPT), "N or MIN:MAX"),
        (("--elastic_server=a:1", SCRIPT), "--elastic_server needs --np"),
        (("--heter_workers=a:1", SCRIPT), "cannot be honoured"),
        (("nothing.py",), "does not exist"),
    ],
)
def test_what_cannot_be_run_exits_with_2(
    argv: tuple[str, ...], text: str, ran: list[LaunchConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """003-24, 003-25."""
    assert launch(*argv) == 2
    error = capsys.readouterr().err
    assert text in error
    assert "python -m fleet.launch: error: " in error.replace("python3", "python")
    assert ran == []


@pytest.mark.parametrize("line", [("--version",), ("--gpus=0", "--version")])
def test_the_version(line: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*line) == 0
    assert capsys.readouterr().out == f"torch-fleet {fleet.__version__}\n"


def test_help_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    """000-09."""
    assert launch("--help") == 0
    text = capsys.readouterr().out
    heads = ["Processes and devices:", "Logs:", "Nodes:", "Failure and elastic:", "Parameter server:"]
    heads += ["Flags of other launchers that do nothing here", "Flags of other launchers that are refused"]
    places = [text.index(f"\n{head}") for head in heads]
    assert places == sorted(places), "what most jobs need stands first, and what does nothing last"
    assert places[0] < text.index("--nproc_per_node") < places[1]
    assert places[-2] < text.index("--monitor_interval") < places[-1] < text.index("--tee")
    assert "default None" not in text
    assert "default False" not in text


def test_windows_is_refused(ran: list[LaunchConfig], capsys: pytest.CaptureFixture[str]) -> None:
    """000-04."""
    assert main([SCRIPT], {}, Machine(system="Windows")) == 2
    assert "does not run on Windows" in capsys.readouterr().err
    assert ran == []


def test_messages_hold_no_secret(ran: list[LaunchConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--api_key=planted", SCRIPT) == 2
    assert "planted" not in capsys.readouterr().err


def test_the_name_of_the_program() -> None:
    """000-05: the printed command begins the way the user called it."""
    assert program_name("/usr/lib/fleet/launch/__main__.py").endswith("-m fleet.launch")
    assert program_name("/usr/bin/fleetrun") == "fleetrun"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("ips", "x" * 100_000, "--ips"),
        ("nnodes", "9" * 100_000, "--nnodes is"),
        ("nproc_per_node", "9" * 100_000, "--nproc_per_node is"),
        ("devices", "9" * 100_000, "--devices is"),
        ("servers", f"10.0.0.1:{'9' * 100_000}", "--servers"),
        ("nnodes", "\N{SUPERSCRIPT TWO}", "it takes N or MIN:MAX"),
        ("ips", "a..b", "not in --ips=a..b"),
        ("", "x" * 100_000, "File name too long"),
    ],
)
def test_endless_and_odd_values_get_one_sentence(
    ran: list[LaunchConfig], capsys: pytest.CaptureFixture[str], flag: str, value: str, words: str
) -> None:
    assert launch(*([f"--{flag}={value}", SCRIPT] if flag else [value])) in (1, 2)
    text = capsys.readouterr().err
    assert words in text
    assert len(text) < 500
    assert not ran
