"""The number of nodes of a running elastic job, as its launchers read it from etcd."""

from __future__ import annotations

from fleet.errors import ConfigError


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
    # Only standard library and the etcd client; they are needed where an elastic job is edited.
    from fleet.env import Environment
    from fleet.launch._elastic_command import ElasticJob
    from fleet.launch._elastic_job import job_prefix
    from fleet.launch._etcd import EtcdStore
    from fleet.launch._etcd_address import check_etcd_client, read_etcd_address
    from fleet.launch._world import read_world

    check_etcd_client()
    store = EtcdStore(read_etcd_address(server, Environment()), timeout_s=5.0)
    try:
        if read_world(store.read(job_prefix(job_id))) is not None:
            ElasticJob(store, job_id).scale(replicas, replicas)
    finally:
        store.close()
