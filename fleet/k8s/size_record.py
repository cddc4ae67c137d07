"""The number of nodes of a running elastic job, as its launchers read it from etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleet.launch.cli.elastic_command import ElasticJob
    from fleet.launch.membership.etcd import EtcdStore


def write_size(server: str | None, job_id: str, replicas: int) -> None:
    """Sets the number of nodes of the job ``job_id``.

    A job whose launchers have not met yet gets its record here. Otherwise pods started before the edit would write the
    old number into it, and refuse pods created after it. With the record their launchers are refused, and their
    containers restart with the new number.

    Args:
        server: host:port of etcd.
        job_id: the job's name in etcd.
        replicas: the number of nodes.

    Raises:
        ConfigError: ``server`` is not known.
        LaunchError: etcd cannot be reached, or the job is over.
    """
    if server is None:
        raise ConfigError(
            f"The elastic job {job_id!r} was edited to {replicas} pods, and the operator does not know etcd. Start it "
            "with --etcd-server host:port."
        )
    from fleet.launch.membership.agreement import Rules, first_world
    from fleet.launch.membership.world import WORLD_KEY, job_prefix, to_text

    with _opened(server, job_id) as (store, job):
        first = to_text(first_world(Rules(min_nodes=replicas, max_nodes=replicas)))
        prefix = job_prefix(job_id)
        if WORLD_KEY in store.read(prefix).texts or not store.swap(prefix + WORLD_KEY, None, first):
            job.scale(replicas, replicas)


def forget_job(server: str | None, job_id: str) -> None:
    """Removes what an earlier job named ``job_id`` left in etcd; its record would end or refuse a new job's launchers.

    Raises LaunchError when etcd cannot be reached, or launchers of the earlier job are still alive.
    """
    if server is not None:
        with _opened(server, job_id) as (_, job):
            job.clean()


@contextlib.contextmanager
def _opened(server: str, job_id: str) -> Iterator[tuple[EtcdStore, ElasticJob]]:
    # Only the standard library and the etcd client; needed where an elastic job is created or edited.
    from fleet.env import Environment
    from fleet.launch.cli.elastic_command import ElasticJob
    from fleet.launch.membership.etcd import EtcdStore
    from fleet.launch.membership.etcd_address import check_etcd_client, read_etcd_address

    check_etcd_client()
    store = EtcdStore(read_etcd_address(server, Environment()), timeout_s=5.0)
    try:
        yield store, ElasticJob(store, job_id)
    finally:
        store.close()
