"""Addresses, users and TLS files of etcd."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.launch.membership.etcd_address import EtcdAddress, check_etcd_client, read_etcd_address


def read(server: str, **env: str) -> EtcdAddress:
    return read_etcd_address(server, Environment(env))


def test_spellings_of_an_address() -> None:
    assert read("10.0.0.1:2379").endpoints == ("10.0.0.1:2379",)
    several = read("etcd://10.0.0.1:2379,[fe80::1]:2380")
    assert several.endpoints == ("10.0.0.1:2379", "[fe80::1]:2380")
    assert several.text == "10.0.0.1:2379,[fe80::1]:2380"
    with pytest.raises(ConfigError, match="host:port"):
        read("10.0.0.1")


def test_user_from_the_address_or_from_variables() -> None:
    inline = read("me:p%40ss@10.0.0.1:2379")
    assert (inline.user, inline.password) == ("me", "p@ss")
    assert "p@ss" not in repr(inline)
    assert "me" not in inline.text
    named = read("me:old@10.0.0.1:2379", FLEET_ETCD_USER="you", FLEET_ETCD_PASSWORD="new")
    assert (named.user, named.password) == ("you", "new")
    with pytest.raises(ConfigError, match="has a user only; it takes both") as caught:
        read("me@10.0.0.1:2379")
    assert "me@" not in str(caught.value)


def test_tls_files(tmp_path: Path) -> None:
    names = {}
    for name in ("FLEET_ETCD_CA", "FLEET_ETCD_CERT", "FLEET_ETCD_KEY"):
        (tmp_path / name).touch()
        names[name] = str(tmp_path / name)
    address = read("10.0.0.1:2379", **names)
    assert (address.ca, address.certificate, address.key) == tuple(names.values())
    with pytest.raises(ConfigError, match="FLEET_ETCD_CA is '/nowhere' in the environment; no such file"):
        read("10.0.0.1:2379", FLEET_ETCD_CA="/nowhere")
    with pytest.raises(ConfigError, match="belong together"):
        read("10.0.0.1:2379", FLEET_ETCD_CERT=names["FLEET_ETCD_CERT"])
    with pytest.raises(ConfigError, match="FLEET_ETCD_CA is not"):
        read("10.0.0.1:2379", FLEET_ETCD_CERT=names["FLEET_ETCD_CERT"], FLEET_ETCD_KEY=names["FLEET_ETCD_KEY"])


def test_missing_client_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """004-20."""
    monkeypatch.setattr("fleet.launch.membership.etcd_address.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[elastic\]'"):
        check_etcd_client()
