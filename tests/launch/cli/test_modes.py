"""Collective or parameter server, and the style of the output."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from tests.helpers.launching import SCRIPT, notes, read


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        ((), "collective"),
        (("--gpus=0",), "collective"),
        (("--server_num=1", "--worker_num=2"), "ps"),
        (("--server_num=1", "--worker_num=2", "--gpus=0,1"), "ps"),
        (("--run_mode=ps", "--server_num=1", "--trainer_num=2"), "ps"),
        (("--servers=127.0.0.1:7000", "--workers=127.0.0.1"), "ps"),
        (("--server-num=1", "--worker-num=2", "--ips=127.0.0.1"), "ps"),
        (("--run_mode=collective",), "collective"),
    ],
)
def test_mode_by_parsed_values(flags: tuple[str, ...], mode: str) -> None:
    assert read(*flags).mode == mode


def test_script_arguments_do_not_choose_the_mode() -> None:
    """001-11: Paddle searched the joined command line for the names."""
    assert read("--gpus=0", script=(SCRIPT, "--servers=1", "--server_num=2")).mode == "collective"


def test_an_empty_list_is_not_given() -> None:
    assert read("--servers=", "--workers=").mode == "collective"


def test_both_modes_at_once_are_an_error() -> None:
    with pytest.raises(ConfigError, match="Only one mode"):
        read("--ips=10.0.0.1,10.0.0.2", "--server_num=1")
    with pytest.raises(ConfigError, match="exclude each other"):
        read("--run_mode=collective", "--server_num=1")


@pytest.mark.parametrize("mode", ["ps-heter", "rpc"])
def test_modes_of_paddle_that_are_not_here(mode: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=mode):
        read(f"--run_mode={mode}")


def test_unknown_modes() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'collective'"):
        read("--run_mode=colective")


def test_the_flags_found_are_reported_in_fleetruns_words() -> None:
    """002-20."""
    text = notes(read("--server_num=1", "--worker_num=2", "--gpus=0,1", num_gpus=8), "INFO")
    assert "Run parameter-sever mode. pserver arguments:['--worker_num', '--server_num'], cuda count:8" in text


def test_fleetruns_words_for_collective_jobs() -> None:
    """002-11."""
    expected = "Not found distinct arguments and compiled with cuda. Default use collective mode"
    assert expected in notes(read("--gpus=0,1", num_gpus=2))
    assert expected not in notes(read("--gpus=0,1"))
    text = notes(read("--ips=127.0.0.1", num_gpus=2), "INFO")
    assert "Run collective mode. gpu arguments:['--ips'], cuda count:2" in text


@pytest.mark.parametrize(
    ("flags", "style"),
    [
        ((), "launch"),
        (("--devices=0",), "launch"),
        (("--nnodes=1",), "launch"),
        (("--gpus=0",), "fleetrun"),
        (("--gpus=0", "--nnodes=1"), "launch"),
        (("--server_num=1", "--worker_num=1"), "fleetrun"),
        (("--server_num=1", "--trainer_num=1"), "launch"),
        (("--gpus=0", "--log_style=launch"), "launch"),
        (("--log_style=fleetrun",), "fleetrun"),
        (("--nproc_per_node=2",), "launch"),
    ],
)
def test_the_family_of_the_flags_chooses_the_style(flags: tuple[str, ...], style: str) -> None:
    """G1."""
    assert read(*flags).log_style == style


def test_the_environment_does_not_choose_the_style() -> None:
    assert read(env={"PADDLE_IPS": "127.0.0.1"}).log_style == "launch"
