"""Opens the membership of a job on etcd: this node's address and its contact."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from fleet.common.addresses import split_endpoint
from fleet.env import Environment
from fleet.errors import LaunchError, RendezvousError
from fleet.launch.cli.elastic import etcd_server
from fleet.launch.membership.engine import Engine, patience_s, read_settings
from fleet.launch.membership.etcd import EtcdUnreachableError
from fleet.launch.membership.etcd_address import EtcdAddress, read_etcd_address
from fleet.launch.membership.etcd_contact import EtcdContact
from fleet.launch.membership.generation import StoppedBySignalError
from fleet.launch.membership.outage import ContactAnswer, nobody_has_contact
from fleet.launch.membership.world import NODE_PREFIX, Node, job_prefix
from fleet.launch.plan.interfaces import address_towards
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox

_RETRY_S = 0.5
_NOTICE_PERIOD_S = 5.0
PORT_FIELD = "contact_port"  # of a published node: the port at which it can be asked about etcd


def open_on_etcd(
    config: LaunchConfig, environment: Environment, log: LaunchLog, signals: SignalInbox
) -> tuple[LaunchConfig, Engine]:
    """Returns the configuration with this node's address, and its membership in the job on etcd.

    Raises:
        RendezvousError: etcd did not answer within the limit.
        LaunchError: etcd refused the user, or a signal came.
    """
    address = read_etcd_address(etcd_server(config), environment)
    if config.command.arguments.get("host") is None:
        config = replace(config, nodes=replace(config.nodes, host=own_host(address)))
    assert config.nodes.host is not None
    members: list[Engine] = []

    def is_outage() -> bool:
        return bool(members) and nobody_has_contact(_others(members[0]), config.pod.secret.encode())

    contact = _first_contact(config, address, is_outage, log, signals)
    try:
        contact.answer = ContactAnswer(
            config.nodes.host, config.pod.secret.encode(), config.pod.id, contact.has_contact
        )
    except LaunchError:
        contact.close()
        raise
    contact.fields = {PORT_FIELD: contact.answer.port}
    membership = Engine(
        contact,
        name=config.pod.id,
        node=Node(host=config.nodes.host, rank=config.nodes.rank),
        settings=read_settings(config),
        log=log,
        signals=signals,
        secret=config.pod.secret.encode(),
    )
    members.append(membership)
    return config, membership


def own_host(address: EtcdAddress) -> str:
    """Returns this node's address on the way to etcd: the network on which the nodes of the job see each other."""
    endpoints = [split_endpoint(endpoint, "The address of etcd") for endpoint in address.endpoints]
    found = (address_towards(host, port) for host, port in endpoints)
    return next((address for address in found if address is not None), "127.0.0.1")


def _others(membership: Engine) -> list[tuple[str, int, str]]:
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
    limit_s = patience_s(config)
    began = noticed = time.monotonic()
    while True:
        try:
            return EtcdContact(
                address,
                prefix=job_prefix(config.job_id),
                key=NODE_PREFIX + config.pod.id,
                ttl_s=config.elastic.ttl_s,
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
            raise StoppedBySignalError(stops[0])
