"""Endpoints, taken apart."""

from __future__ import annotations

import pytest

from fleet.errors import ConfigError
from fleet.launch.plan.addresses import hide_user, is_loopback, join_endpoint, split_endpoint, split_list, split_master


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
    assert is_loopback("127.0.0.1")
    assert not is_loopback("127.0.0.2")  # tests use these as several nodes on one machine
    assert hide_user("etcd://me:pw@a:1") == "etcd://***@a:1"
    assert hide_user("me:pw@a:1") == "***@a:1"
    assert hide_user("a:1") == "a:1"
