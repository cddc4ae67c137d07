"""Opens the membership of a job on etcd: this node's address, the contact, the rules of the job's family."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fleet.env import Environment
from fleet.errors import LaunchError, RendezvousError
from fleet.launch.cli.elastic import etcd_server
from fleet.launch.membership.engine import PORT_FIELD, ElasticMembership, ElasticSettings
from fleet.launch.membership.etcd import EtcdUnreachableError
from fleet.launch.membership.etcd_address import EtcdAddress, read_etcd_address
from fleet.launch.membership.etcd_contact import EtcdContact
from fleet.launch.membership.membership import StoppedBySignalError
from fleet.launch.membership.outage import ContactAnswer, nobody_has_contact
from fleet.launch.membership.rules import END, IN_PLACE, SCHEDULER, ElasticRules
from fleet.launch.membership.world import NODE_PREFIX, Node
from fleet.launch.plan.addresses import split_endpoint
from fleet.launch.plan.interfaces import address_towards
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox

_RETRY_S = 0.5
_NOTICE_PERIOD_S = 5.0
# As for the other meeting points: absent nodes of a fixed job, and etcd at the start, are waited for this much longer.
_FIXED_JOB_FACTOR = 10


def job_prefix(job_id: str) -> str:
    """Returns what stands before every key of a job on etcd."""
    return f"/paddle/{job_id}/"


def open_elastic(
    config: LaunchConfig, environment: Environment, log: LaunchLog, signals: SignalInbox
) -> tuple[LaunchConfig, ElasticMembership]:
    """Returns the configuration with this node's address, and its membership in the job on etcd.

    Raises:
        RendezvousError: etcd did not answer within the limit.
        LaunchError: etcd refused the user, or a signal came.
    """
    address = read_etcd_address(etcd_server(config), environment)
    if config.arguments.get("host") is None:
        config = replace(config, host=own_host(address))
    assert config.host is not None
    members: list[ElasticMembership] = []

    def is_outage() -> bool:
        return bool(members) and nobody_has_contact(_others(members[0]), config.secret.encode())

    contact = _first_contact(config, address, is_outage, log, signals)
    try:
        answer = ContactAnswer(config.host, config.secret.encode(), config.pod_id, contact.has_contact)
    except LaunchError:
        contact.close()
        raise
    membership = ElasticMembership(
        contact,
        name=config.pod_id,
        node=Node(host=config.host, rank=config.node_rank),
        settings=read_settings(config),
        answer=answer,
        log=log,
        signals=signals,
        secret=config.secret.encode(),
    )
    members.append(membership)
    return config, membership


def read_settings(config: LaunchConfig) -> ElasticSettings:
    """Returns how a launcher with ``config`` takes part.

    The older family of flags asks a scheduler for a restart (exit code 101), unless ``--max_restart`` was given; the
    newer one restarts in place.
    """
    in_place = not config.is_scheduled or config.max_restart > 0
    fault = IN_PLACE if in_place else SCHEDULER if config.elastic_fault_level == 1 else END
    rules = ElasticRules(
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        quiet_s=config.elastic_timeout_s,
        sort_ip=config.sort_ip,
        is_elastic=config.is_elastic,
        fault=fault,
    )
    return ElasticSettings(
        rules=rules,
        max_restarts=config.group_restarts,
        changes_np=config.elastic_force or config.elastic_scale > 0,
        grace_s=config.grace_s,
        wait_limit_s=None if config.is_elastic else config.elastic_timeout_s * _FIXED_JOB_FACTOR,
    )


def own_host(address: EtcdAddress) -> str:
    """Returns this node's address on the way to etcd: the network on which the nodes of the job see each other."""
    endpoints = [split_endpoint(endpoint, "The address of etcd") for endpoint in address.endpoints]
    found = (address_towards(host, port) for host, port in endpoints)
    return next((address for address in found if address is not None), "127.0.0.1")


def _others(membership: ElasticMembership) -> list[tuple[str, int, str]]:
    """Returns where the other members of this node's generation can be asked, and their names."""
    world = membership.world
    if world is None:
        return []
    peers = zip(world.nodes, world.peers, strict=True)
    return [(str(peer["host"]), int(peer.get(PORT_FIELD, 0)), name) for name, peer in peers if name != membership.name]


def _first_contact(
    config: LaunchConfig,
    address: EtcdAddress,
    is_outage: Callable[[], bool],
    log: LaunchLog,
    signals: SignalInbox,
) -> EtcdContact:
    limit_s = config.elastic_timeout_s * _FIXED_JOB_FACTOR
    began = noticed = time.monotonic()
    while True:
        try:
            return EtcdContact(
                address,
                prefix=job_prefix(config.job_id),
                key=NODE_PREFIX + config.pod_id,
                ttl_s=config.elastic_ttl_s,
                is_outage=is_outage,
            )
        except EtcdUnreachableError as error:
            now = time.monotonic()
            if now - began >= limit_s:
                raise RendezvousError(
                    f"{error} It was tried for {limit_s:.0f} s. Check the address, or raise --elastic_timeout."
                ) from error
            if now - noticed > _NOTICE_PERIOD_S or noticed == began:
                noticed = now
                log.info(f"Waiting peer start... {error}")
        signals.wait(_RETRY_S)
        if stops := signals.take():
            raise StoppedBySignalError(f"Terminating with signal {stops[0]}", 128 + stops[0])


def run_hook(words: Sequence[str], environment: Mapping[str, str], log: LaunchLog, signals: SignalInbox) -> None:
    """Runs the command of ``--elastic_pre_hook`` to its end; raises LaunchError with its code when it fails."""
    if not words:
        return
    try:
        hook = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise LaunchError(f"--elastic_pre_hook: {words[0]!r} cannot be started: {error.strerror}.") from error
    output = ""
    with hook:
        while hook.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output = hook.communicate(timeout=_RETRY_S)[0]
            if stops := signals.take():
                hook.kill()
                raise StoppedBySignalError(f"Terminating with signal {stops[0]}", 128 + stops[0])
    for line in output.splitlines():
        log.opening(f"elastic_pre_hook: {line}")
    if hook.returncode:
        code = hook.returncode if hook.returncode > 0 else 128 - hook.returncode
        raise LaunchError(
            f"--elastic_pre_hook {words[0]!r} ended with code {code}; the workers were not started.", code
        )
