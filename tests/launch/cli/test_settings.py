"""Cutting the command line: spellings, removed and unknown flags, help; one typed value per flag, and its origin."""

from __future__ import annotations

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.launch.cli.flag import GROUPS
from fleet.launch.cli.flags import FLAGS
from fleet.launch.cli.settings import (
    CommandLine,
    Settings,
    UsageError,
    build_parser,
    convert,
    launcher_environment,
    parse_command_line,
    read_settings,
)
from fleet.launch.cli.unused_flags import REMOVED


def parse(*argv: str) -> dict[str, str]:
    return parse_command_line(argv, "launch").flags


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_both_spellings_of_every_flag(flag: object) -> None:
    name = flag.name  # type: ignore[attr-defined]
    text = "true" if flag.kind == "switch" else "5"  # type: ignore[attr-defined]
    for spelling in flag.spellings:  # type: ignore[attr-defined]
        if spelling == "-m":
            continue
        assert parse(f"{spelling}={text}", "t.py") == {name: text}
        assert parse(spelling, text, "t.py") == {name: text}


def test_help_lists_every_flag_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    """000-09."""
    with pytest.raises(SystemExit) as stop:
        parse_command_line(["--help"], "launch")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in FLAGS.values():
        assert f"--{flag.name}" in text
    assert [text.index(f"\n{title}:") for title in GROUPS] == sorted(text.index(f"\n{title}:") for title in GROUPS)
    assert "(default 6070)" in " ".join(text.split())
    assert "PADDLE_NNODES, PET_NNODES" in text


@pytest.mark.parametrize(
    "name", ["cluster_node_ips", "selected_gpus", "node_ip", "use_paddlecloud", "started_port", "print_config"]
)
def test_removed_flags_are_unrecognized_and_name_their_successor(name: str) -> None:
    """003-24, 003-25."""
    for spelling in (f"--{name}=1", f"--{name.replace('_', '-')}=1"):
        with pytest.raises(UsageError, match="unrecognized arguments") as caught:
            parse(spelling, "t.py")
        assert REMOVED[name] in str(caught.value)


def test_removed_flags_name_the_flag_to_use() -> None:
    """003-24."""
    with pytest.raises(UsageError, match="use --ips"):
        parse("--cluster_node_ips=1.2.3.4", "t.py")
    with pytest.raises(UsageError, match="use --gpus"):
        parse("--selected_gpus=0", "t.py")


def test_unknown_flags_suggest_a_known_one() -> None:
    with pytest.raises(UsageError, match="unrecognized arguments: --gpu=0. Did you mean '--gpus'"):
        parse("--gpu=0", "t.py")


def test_no_flag_may_be_shortened() -> None:
    """004-02: --np is a flag of its own and no abbreviation of --nproc_per_node."""
    assert parse("--elastic_server=10.0.0.1:2379", "--np=2", "--job_id=J", "t.py") == {
        "elastic_server": "10.0.0.1:2379",
        "np": "2",
        "job_id": "J",
    }
    for short in ("--nnode=2", "--maste=a:1"):
        with pytest.raises(UsageError, match="unrecognized"):
            parse(short, "t.py")


def test_values_may_stand_behind_a_space_and_hold_spaces() -> None:
    """002-13, 003-01."""
    assert parse("--ips", "10.0.0.1,10.0.0.2", "--gpus", "1, 3", "t.py") == {"ips": "10.0.0.1,10.0.0.2", "gpus": "1, 3"}
    assert parse("--gpus=1, 3", "t.py") == {"gpus": "1, 3"}
    assert parse("--rank", "-1", "t.py") == {"rank": "-1"}


def test_switches_do_not_swallow_the_script() -> None:
    line = parse_command_line(["--log_overwrite", "t.py", "true"], "launch")
    assert (line.flags, line.script, line.script_args) == ({"log_overwrite": "true"}, "t.py", ("true",))
    assert parse("--log_overwrite", "False", "t.py") == {"log_overwrite": "False"}
    line = parse_command_line(["-m", "on", "x"], "launch")  # a module may be called like a switch word
    assert (line.script, line.script_args) == ("on", ("x",))


def test_a_missing_script_or_value_is_named() -> None:
    for argv, text in (
        ((), "script is missing"),
        (("--gpus=0",), "script is missing"),
        (("--gpus",), "value is missing"),
        (("--nnodes", "--master", "a:1", "t.py"), "--nnodes: a value is missing"),
    ):
        with pytest.raises(UsageError, match=text):
            parse(*argv)


def test_the_script_begins_behind_two_dashes() -> None:
    line = parse_command_line(["--gpus=0", "--", "-odd.py", "--gpus=1"], "launch")
    assert (line.script, line.script_args) == ("-odd.py", ("--gpus=1",))


def test_the_parser_is_argparses() -> None:
    assert build_parser("launch").allow_abbrev is False


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
