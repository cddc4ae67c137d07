"""The number of nodes of a running elastic job, as its launchers read it from etcd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleet.launch._elastic_command import ElasticJob
    from fleet.launch._etcd import EtcdStore


def write_size(server: str | None, job_id: str, replicas: int) -> None:
    """Sets the number of nodes of the job ``job_id``; a job whose launchers have not started yet has none to set.

    Args:
        server: host:port of etcd.
        job_id: the job's name on etcd.
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
    from fleet.launch._elastic_job import job_prefix
    from fleet.launch._world import read_world

    with _opened(server, job_id) as (store, job):
        if read_world(store.read(job_prefix(job_id))) is not None:
            job.scale(replicas, replicas)


def forget_job(server: str | None, job_id: str) -> None:
    """Removes what an earlier job named ``job_id`` left on etcd; its record would end or refuse a new one's launchers.

    Raises LaunchError when etcd cannot be reached, or launchers of the earlier job are still alive.
    """
    if server is not None:
        with _opened(server, job_id) as (_, job):
            job.clean()


@contextlib.contextmanager
def _opened(server: str, job_id: str) -> Iterator[tuple[EtcdStore, ElasticJob]]:
    # Only standard library and the etcd client; they are needed where an elastic job is made or edited.
    from fleet.env import Environment
    from fleet.launch._elastic_command import ElasticJob
    from fleet.launch._etcd import EtcdStore
    from fleet.launch._etcd_address import check_etcd_client, read_etcd_address

    check_etcd_client()
    store = EtcdStore(read_etcd_address(server, Environment()), timeout_s=5.0)
    try:
        yield store, ElasticJob(store, job_id)
    finally:
        store.close()
