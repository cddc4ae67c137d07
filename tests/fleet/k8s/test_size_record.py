"""The size of an elastic job on etcd."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.env import Environment
from fleet.errors import ConfigError, LaunchError
from fleet.k8s.size_record import forget_job, write_size
from fleet.launch.membership.agreement import Rules, first_world
from fleet.launch.membership.world import COMPLETE, Node, to_json
from tests.helpers import etcd


def test_without_an_address_the_edit_is_refused() -> None:
    with pytest.raises(ConfigError, match="edited to 3 pods.*--etcd-server host:port"):
        write_size(None, "default-demo", 3)


@pytest.mark.skipif(bool(etcd.missing()), reason=etcd.missing() or "no reason")
def test_a_job_that_has_not_started_gets_its_size(tmp_path: Path) -> None:
    """004-17: pods that started before the edit come with the old one; a job that runs is in test_operator."""
    from fleet.launch.membership.etcd import EtcdStore
    from fleet.launch.membership.etcd_address import read_etcd_address

    with etcd.Etcd(tmp_path / "etcd") as server:
        address = server.endpoint
        store = EtcdStore(read_etcd_address(address, Environment({})), timeout_s=5.0)
        for size in (3, 4):
            write_size(address, "default-demo", size)
            world = store.read("/paddle/default-demo/").values["world"]
            assert (world["min_nodes"], world["max_nodes"], world["generation"], world["nodes"]) == (size, size, 0, [])
        store.close()
    with pytest.raises(LaunchError):
        write_size(address, "default-demo", 3)


@pytest.mark.slow
@pytest.mark.skipif(bool(etcd.missing()), reason=etcd.missing() or "no reason")
def test_what_an_earlier_job_left_is_removed_unless_its_launchers_live(tmp_path: Path) -> None:
    """004-16: else the launchers of a job that is made again with the same name would hear that it is complete."""
    from fleet.launch.membership.etcd import EtcdStore
    from fleet.launch.membership.etcd_address import read_etcd_address

    forget_job(None, "default-demo")  # nobody knows an etcd
    record = to_json(replace(first_world(Rules(min_nodes=2, max_nodes=2)), state=COMPLETE))
    with etcd.Etcd(tmp_path / "etcd") as server:
        store = EtcdStore(read_etcd_address(server.endpoint, Environment({})), timeout_s=5.0)
        store.put("/paddle/default-demo/world", json.dumps(record))
        store.put("/paddle/default-demo/node/a", json.dumps(to_json(Node(host="10.0.0.1"))))
        with pytest.raises(LaunchError, match=r"still has launchers on 10\.0\.0\.1"):
            forget_job(server.endpoint, "default-demo")
        store.delete("/paddle/default-demo/node/")
        forget_job(server.endpoint, "default-demo")
        assert store.read("/paddle/").values == {}
        store.close()
