"""A node's standing contact with the key-value service, which this launcher may host itself.

A thread keeps the newest view; that it waits at the service is this node's sign of life. A service that is lost stays
lost: it held the job's records in the memory of the launcher that hosted it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from fleet.common.addresses import join_endpoint
from fleet.common.own_thread import OwnThread
from fleet.launch.membership.kv_client import KeyValueClient
from fleet.launch.membership.kv_service import KeyValueService
from fleet.launch.membership.store import StoreLostError, View
from fleet.launch.processes.logs import LaunchLog
from fleet.launch.processes.signals import SignalInbox, Wakeup

_NOTICE_PERIOD_S = 5.0
_FORGET_S = 1.0


class KeyValueContact(Wakeup):
    """Holds this node's key at the service; ``fileno`` is readable on news.

    Args:
        client: connected to the service.
        prefix: stands before every key of the job, with a slash at its end.
        key: this node's key under the prefix.
        service: the service when this launcher hosts it.
    """

    def __init__(
        self,
        client: KeyValueClient,
        *,
        prefix: str,
        key: str,
        service: KeyValueService | None,
        log: LaunchLog,
        signals: SignalInbox,
    ) -> None:
        super().__init__()
        self._client = client
        self.prefix = prefix
        self._key = prefix + key
        self._service = service
        self._log = log
        self._signals = signals
        self.where = f"at {join_endpoint(*client.address)}"
        self.ttl_s = client.ttl_s
        self.forget_s = client.ttl_s + _FORGET_S
        self.fields: Mapping[str, Any] = {}
        self.has_claimed = self.is_taken = False
        self.is_lost = self.is_cut_off = False
        self._silence = ""
        self._view = client.read(prefix)
        self._closing = False
        self._thread = OwnThread(self._run, name="rendezvous-watch", say=log.error, then=self.notify)
        self._thread.start()

    def view(self) -> View:
        """Returns the newest view, however old."""
        self._thread.check()
        if self._service is not None:
            self._service.check()
        return self._view

    def fresh_view(self) -> View | None:
        """Returns a view read now; None once the service is lost."""
        try:
            return self._client.read(self.prefix)
        except StoreLostError as error:
            self._lose(error)
            return None

    def publish(self, text: str) -> None:
        """Sets this node's key, unless another launcher holds it."""
        try:
            if self.has_claimed:
                self._client.put(self._key, text, leased=True)
                return
            claimed = self._client.swap(self._key, None, text, leased=True)
            # A request is sent again when its connection broke, so the key may be there from the first time.
            self.has_claimed = claimed or self._client.read(self._key).texts.get("") == text
            self.is_taken = not self.has_claimed
        except StoreLostError as error:
            self._lose(error)

    def rejoin(self) -> None:
        """Changes nothing: a service that was lost stays lost."""

    def swap(self, key: str, old_text: str | None, text: str | None, *, ends: bool = False) -> bool:
        """Compare-and-set; False also once the service is lost. Nothing outlives the service, so ``ends`` is moot."""
        try:
            return self._client.swap(self.prefix + key, old_text, text)
        except StoreLostError as error:
            self._lose(error)
            return False

    def silence(self) -> str:
        """Returns how the service was lost; empty while it is there."""
        return self._silence

    def trusts_absence(self) -> bool:
        """Returns True: the service has known its nodes all the time."""
        return True

    def close(self, record: str | None = None, *, linger_s: float | None = 0.0) -> None:
        """Leaves the job: this node's key is gone when it returns. The host stays until the others have left."""
        with contextlib.suppress(StoreLostError):
            if record is not None and self.has_claimed and not self.is_lost:
                # The own key goes first: a launcher that then finds the record alone is the last, and takes it along.
                self._client.put(self._key, None)
                left = self._client.read(self.prefix).texts
                if list(left) == [record]:
                    self._client.swap(self.prefix + record, left[record], None)
        self._closing = True
        self._client.close()
        self._thread.join(5.0)
        self.close_pipe()
        if self._service is not None:
            self._linger(self._service, linger_s)
            self._service.close()

    def _linger(self, service: KeyValueService, limit_s: float | None) -> None:
        """Waits until the other launchers have left the service, at most ``limit_s``; a signal ends the wait."""
        began = time.monotonic()
        told = False
        num_signals = len(self._signals.received)
        while service.num_sessions() and len(self._signals.received) == num_signals:
            waited_s = time.monotonic() - began
            if limit_s is not None and waited_s > limit_s:
                break
            if waited_s > _NOTICE_PERIOD_S and not told:
                told = True
                self._log.info("This node's part is complete; other launchers still use its rendezvous service.")
            self._signals.wait(0.05)
            self._signals.take()

    def _run(self) -> None:
        while not self._closing:
            try:
                # The waiting request is this node's sign of life, sent four times within a lease.
                view = self._client.wait(self.prefix, self._view.revision, self.ttl_s / 4)
            except StoreLostError as error:
                self._lose(error)
                return
            if view.revision != self._view.revision:
                self._view = view
                self.notify()

    def _lose(self, error: StoreLostError) -> None:
        self._silence = self._silence or f"{error}"
        self.is_lost = self.is_cut_off = True
        self.notify()
