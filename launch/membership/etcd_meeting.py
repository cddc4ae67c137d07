"""Opens the membership of a job on etcd, and holds this node's contact: lease, own key, newest view, and silence."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fleet.common.addresses import split_endpoint
from fleet.common.own_thread import OwnThread
from fleet.env import Environment
from fleet.errors import LaunchError, RendezvousError
from fleet.launch.cli.elastic import etcd_server
from fleet.launch.membership.engine import Engine, patience_s, read_settings
from fleet.launch.membership.etcd import EtcdStore, EtcdUnreachableError
from fleet.launch.membership.etcd_address import EtcdAddress, read_etcd_address
from fleet.launch.membership.generation import StoppedBySignalError
from fleet.launch.membership.outage import ContactAnswer, nobody_has_contact
from fleet.launch.membership.store import View
from fleet.launch.membership.world import NODE_PREFIX, Node, job_prefix
from fleet.launch.plan.interfaces import address_towards
from fleet.launch.plan.records import LaunchConfig
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox, Wakeup

_RETRY_S = 0.5
_NOTICE_PERIOD_S = 5.0
PORT_FIELD = "contact_port"  # of a published node: the port at which it can be asked about etcd
# How long the record of a job that is over stays, for launchers that come late.
END_LEASE_S = 600
_PERIOD_S = 1.0
_COUNT_S = 0.2
_WATCH_IDLE_S = 10.0
# How long nobody is given up after etcd was out of reach: every living node is back by then.
_COME_BACK_S = 3.0
# Kept free at the end of the lease to stop the workers in.
_STOP_S = 0.8
# Until etcd has removed the key of a launcher that was killed, beyond the time of its lease.
_FORGET_S = 5.0


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


class EtcdContact(Wakeup):
    """Holds this node's lease and key on etcd; ``fileno`` is readable when there may be something to do.

    One thread renews the lease, writes this node's key whenever it changed or its lease was lost, and reads all keys of
    the job; a second one waits for etcd's hints and wakes the first; a third one counts the silence. The main thread
    never waits for etcd: it leaves the key to be written and takes the newest view.

    Args:
        address: where etcd is.
        prefix: stands before every key of the job, with a slash at its end.
        key: this node's key under the prefix.
        ttl_s: etcd deletes the key after this long without a renewal.
        is_outage: asked while etcd is silent: whether it is proved that it answers no other node either.
    """

    def __init__(
        self, address: EtcdAddress, *, prefix: str, key: str, ttl_s: int, is_outage: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self._key = key
        self._is_outage = is_outage
        self.ttl_s: float = ttl_s
        self.where = "on etcd"
        self.forget_s = ttl_s + _FORGET_S
        self.is_lost = False  # it may always come back
        self.answer: ContactAnswer | None = None  # tells the other launchers whether etcd answers this one
        self.fields: Mapping[str, Any] = {}
        self._period_s = min(_PERIOD_S, ttl_s / 6)
        self._timeout_s = timeout_s = min(max(ttl_s / 6, 0.5), 3.0)
        self._own_store, self._main_store, self._hint_store = (
            EtcdStore(address, timeout_s=timeout_s) for _ in range(3)
        )
        self._lease: int | None = None
        self._leases: set[int] = set()  # all that this launcher has had
        self.has_claimed = self.is_taken = False  # this node's key: by this launcher, by another one
        self._text: str | None = None  # the text that this node's key has to hold
        self._written: str | None = None
        self._error: LaunchError | None = None
        self._closing = threading.Event()
        self._wake = threading.Event()
        began = time.monotonic()
        # The first read is not retried, so that a wrong address is an error at once.
        self._view = self._own_store.read(prefix)
        self._answered_at = began
        self._steady_since = began - ttl_s
        self.is_cut_off = False
        self._threads = [
            OwnThread(target, name=f"etcd-{target.__name__.strip('_')}", then=self.notify)
            for target in (self._keep, self._hear, self._count)
        ]
        for thread in self._threads:
            thread.start()

    # -- for the main thread ------------------------------------------------------------------------------------

    def view(self) -> View:
        """Returns the newest view, however old."""
        for thread in self._threads:
            thread.check()
        return self._view

    def publish(self, text: str) -> None:
        """Leaves ``text`` to be written as this node's key, now and after every loss of the lease."""
        self._text = text
        self._wake.set()

    def rejoin(self) -> None:
        """Says that the workers are stopped: being cut off has no further consequence."""
        self.is_cut_off = False

    def swap(self, key: str, old_text: str | None, text: str | None, *, ends: bool = False) -> bool:
        """Compare-and-set; False also when etcd does not answer. With ``ends`` the key goes by itself in the end."""
        try:
            lease = self._main_store.grant(END_LEASE_S) if ends else None
            return self._main_store.swap(self.prefix + key, old_text, text, lease)
        except LaunchError:
            return False
        finally:
            self._wake.set()

    def fresh_view(self) -> View | None:
        """Returns a view read now; None when etcd does not answer."""
        try:
            return self._main_store.read(self.prefix)
        except LaunchError:
            return None

    def silence(self) -> str:
        """Returns why etcd does not answer at present; empty when it does."""
        return "" if self._error is None else f"{self._error}"

    def has_contact(self) -> bool:
        """Returns whether etcd has answered as lately as it does when all is well."""
        return time.monotonic() - self._answered_at < self._period_s + self._timeout_s + _COUNT_S

    def trusts_absence(self) -> bool:
        """Returns whether etcd has answered for long enough that every living node has had time to come back."""
        return self._error is None and time.monotonic() - self._steady_since >= min(self.ttl_s, _COME_BACK_S)

    def close(self, record: str | None = None, *, linger_s: float | None = 0.0) -> None:
        """Gives the lease back, and with it this node's key, and ends the threads; nobody needs this node any more.

        ``record`` is deleted as well when it is then the only key of the job.
        """
        if self.answer is not None:
            self.answer.close()
        self._closing.set()
        self._wake.set()
        # The thread that renews ends first, or it would take a new lease for the one given back below.
        self._threads[0].join(self.ttl_s)
        with contextlib.suppress(LaunchError):
            if self._lease is not None:
                self._main_store.revoke(self._lease)
            left = self._main_store.read(self.prefix) if record is not None else None
            if record is not None and left is not None and list(left.texts) == [record]:
                self._main_store.swap(self.prefix + record, left.texts[record], None)
        for store in (self._main_store, self._own_store, self._hint_store):
            store.close()
        self._threads[2].join(2.0)
        if not any(thread.is_alive() for thread in (self._threads[0], self._threads[2])):
            self.close_pipe()

    # -- the threads --------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Wakes the main thread at every period, because some rules wait for time to pass."""
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._renew()
                view = self._own_store.read(self.prefix)
            except LaunchError as error:
                self._error = error
                self.notify()
            else:
                self._view = view
                if self._error is not None:
                    self._steady_since = began
                    self._error = None
                self._answered_at = began
                self.notify()
            self._wake.wait(self._period_s)
            self._wake.clear()

    def _renew(self) -> None:
        if self._lease is not None and not self._own_store.keep_alive(self._lease):
            self._lease = None
        if self._lease is None:
            self._lease = self._own_store.grant(int(self.ttl_s))
            self._written = None
            self._leases.add(self._lease)
        text = self._text
        key = self.prefix + self._key
        if text is None or text == self._written:
            return
        if self._written is None:
            # After a loss of the lease the key may still stand under the old one, and is this node's all the same.
            claimed = self._own_store.claim(key, text, self._lease, self._leases)
            self.has_claimed = self.has_claimed or claimed
            self.is_taken = not claimed
        else:
            self._own_store.put(key, text, self._lease)
        self._written = None if self.is_taken else text

    def _hear(self) -> None:
        while not self._closing.is_set():
            # Hints alone: the thread that renews meets the same error and keeps it.
            with contextlib.suppress(LaunchError):
                for _ in self._hint_store.watch(self.prefix, _WATCH_IDLE_S):
                    if self._closing.is_set():
                        return
                    self._wake.set()
            time.sleep(_COUNT_S)

    def _count(self) -> None:
        """Sets ``is_cut_off`` shortly before the lease ends, unless the silence is proved to be everybody's."""
        proved_at = 0.0
        while not self._closing.is_set():
            time.sleep(_COUNT_S)
            if self.has_contact():
                continue
            error = self._error
            is_down = isinstance(error, EtcdUnreachableError) and error.is_down
            began = time.monotonic()
            if is_down or self._is_outage():
                proved_at = began
            # After an outage nobody is given up before _COME_BACK_S have passed, so this node has as long.
            safe_until = max(self._answered_at + self.ttl_s, proved_at + min(self.ttl_s, _COME_BACK_S)) - _STOP_S
            if time.monotonic() > safe_until and not self.is_cut_off:
                self.is_cut_off = True
                self.notify()
