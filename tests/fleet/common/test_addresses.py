"""Endpoints, taken apart."""

from __future__ import annotations

import pytest

from fleet.common.addresses import (
    hide_user,
    is_loopback,
    join_endpoint,
    means_itself,
    split_endpoint,
    split_list,
    split_master,
)
from fleet.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:80", "10.0.0.1", 80), (" node-1:65535 ", "node-1", 65535), ("[fd00::1]:80", "fd00::1", 80)],
)
def test_endpoints(text: str, host: str, port: int) -> None:
    assert split_endpoint(text, "--x") == (host, port)
    assert split_endpoint(join_endpoint(host, port), "--x") == (host, port)


def test_a_default_port() -> None:
    assert split_endpoint("a", "--x", 5) == ("a", 5)
    assert split_endpoint("[fd00::1]", "--x", 5) == ("fd00::1", 5)


@pytest.mark.parametrize("text", ["", ":", "a", "a:", ":1", "a:0", "a:65536", "a:b", "a b:1", "a/b:1", "u@h:1"])
def test_wrong_endpoints(text: str) -> None:
    with pytest.raises(ConfigError, match="--x has"):
        split_endpoint(text, "--x")


@pytest.mark.parametrize("text", ["h:\u00b2", "h:\u0663", "h:" + "7" * 5000])
def test_digits_of_other_scripts_are_no_port(text: str) -> None:
    with pytest.raises(ConfigError, match="a port from 0 to 65535"):
        split_endpoint(text, "--x", lowest_port=0)
    assert split_endpoint("h:0", "--x", lowest_port=0) == ("h", 0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert means_itself(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_interface_is_no_loopback_and_means_the_reader(host: str) -> None:
    assert not is_loopback(host)
    assert means_itself(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "node-1", "127.example.org", "fd00::1", ""])
def test_another_machine(host: str) -> None:
    assert not is_loopback(host)
    assert not means_itself(host)


def test_masters() -> None:
    assert split_master("a:1", "m") == ("http", "a:1")
    assert split_master("http://a:1/", "m") == ("http", "a:1")
    assert split_master("etcd://u:p@a:1,b:2", "m") == ("etcd", "u:p@a:1,b:2")
    with pytest.raises(ConfigError) as caught:
        split_master("http://me:pw@a:1", "m")
    assert "pw" not in str(caught.value)


def test_small_things() -> None:
    assert split_list(" a , ,b,") == ["a", "b"]
    assert split_list(None) == []
    assert hide_user("etcd://me:pw@a:1") == "etcd://***@a:1"
    assert hide_user("me:pw@a:1") == "***@a:1"
    assert hide_user("a:1") == "a:1"
