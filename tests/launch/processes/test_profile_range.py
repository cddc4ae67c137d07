"""The range of --profile."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from fleet.launch.processes.profile_range import read_range
from tests.helpers.launching import plan, read


@pytest.mark.parametrize(("text", "found"), [("10:13", (10, 13)), (" 0:1 ", (0, 1)), ("5:1005", (5, 1005))])
def test_steps_from_the_first_up_to_the_last(text: str, found: tuple[int, int]) -> None:
    assert read_range(text, "--profile") == found


@pytest.mark.parametrize("text", ["13:10", "10:10", "0:1001"])
def test_an_empty_or_huge_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--profile is .*LAST is greater than FIRST, by 1000 at most"):
        read_range(text, "--profile")


@pytest.mark.parametrize("text", ["10", "a:b", "-1:3", "10:", "1:2:3", "", "1.5:2", "9" * 700 + ":1"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="takes FIRST:LAST, numbers of steps counted from 0, as in 10:13"):
        read_range(text, "--profile")


def test_the_workers_get_the_range_from_the_flag_or_the_environment() -> None:
    assert plan(read("--profile=10:13", "--nproc_per_node=2"))[1].environment["FLEET_PROFILE"] == "10:13"
    assert plan(read(env={"FLEET_PROFILE": "1:2"}))[0].environment["FLEET_PROFILE"] == "1:2"
    assert "FLEET_PROFILE" not in plan(read())[0].environment


def test_a_bad_range_is_refused_before_the_job_starts() -> None:
    with pytest.raises(ConfigError, match="--profile is '13:10'"):
        read("--profile=13:10")
    with pytest.raises(ConfigError, match="FLEET_PROFILE is 'x'"):
        read(env={"FLEET_PROFILE": "x"})
