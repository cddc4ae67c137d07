"""One typed value per flag, and where it came from."""

from __future__ import annotations

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.launch.cli.flags import FLAGS
from fleet.launch.cli.parser import CommandLine
from fleet.launch.cli.settings import Settings, convert, launcher_environment, read_settings


def settings(flags: dict[str, str], env: dict[str, str] | None = None) -> Settings:
    return read_settings(CommandLine(flags, "t.py", ()), Environment(env or {}))


def test_source_of_a_value() -> None:
    found = settings({"rank": "1"}, {"PADDLE_NNODES": "2", "PET_NNODES": "3"})
    assert [found.named(name) for name in ("rank", "nnodes", "master")] == ["--rank", "PADDLE_NNODES", "--master"]
    assert (found.number("rank"), found.text("nnodes"), found.text("master")) == (1, "2", None)
    assert found.on_command_line == {"rank"}


def test_a_blank_variable_is_absent() -> None:
    """E.3: templates write an empty text for what is not set."""
    assert not settings({}, {"PADDLE_MASTER": " "}).has("master")


def test_a_wrong_twin_of_a_given_flag_is_only_a_warning() -> None:
    found = settings({"rank": "1"}, {"PADDLE_RANK": "one"})
    assert "wins over PADDLE_RANK=one" in found.notes[0].text


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rank", " 3 ", 3),
        ("sort_ip", "Yes", True),
        ("sort_ip", "0", False),
        ("elastic_timeout", "1.5", 1.5),
        ("elastic_timeout", "30", 30),
        ("master", " a:1 ", "a:1"),
    ],
)
def test_kinds(name: str, text: str, value: object) -> None:
    assert convert(FLAGS[name], text, f"--{name}") == value


@pytest.mark.parametrize(("name", "text"), [("rank", "1.5"), ("elastic_timeout", "-1"), ("elastic_timeout", "inf")])
def test_wrong_texts(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name} is '{text}'"):
        convert(FLAGS[name], text, f"--{name}")


def test_notes_never_hold_secrets() -> None:
    found = settings({"auto_tuner_json": "API_KEY=abc123"})
    assert "abc123" not in found.notes[0].text


def test_a_nested_launcher_reads_the_users_variables_only() -> None:
    inherited = {"FLEET_POD": "x", "PADDLE_TRAINER_ID": "1", "HOME": "h", "PADDLE_IPS": "a"}
    env = launcher_environment(Environment(inherited))
    assert env.inherited() == {"HOME": "h", "PADDLE_IPS": "a"}
    outer = Environment({"PADDLE_TRAINER_ID": "1"})
    assert launcher_environment(outer) is outer
