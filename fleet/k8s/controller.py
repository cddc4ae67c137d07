"""A queue of jobs to reconcile, and the thread that reconciles them one by one."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from fleet.common.own_thread import OwnThread
from fleet.errors import FleetError
from fleet.k8s.objects import Document
from fleet.k8s.paddle_job import VOLCANO
from fleet.k8s.reconcile import plan_reconcile

if TYPE_CHECKING:
    from fleet.k8s.cluster import Cluster

LOGGER = logging.getLogger("fleet.k8s")
Key = tuple[str, str]
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
RESYNC_S = 60.0


class Queue:
    """Keys with the time at which each is due; a waiting key is in the queue once."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._changed = threading.Condition()
        self._closed = False

    def add(self, key: Key, delay_s: float = 0.0) -> None:
        """Makes ``key`` due after ``delay_s``, or when it already is due if that is earlier."""
        with self._changed:
            due = time.monotonic() + delay_s
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                heapq.heappush(self._heap, (due, key))
                self._changed.notify()

    def take(self, limit_s: float) -> Key | None:
        """Returns the next due key; None after ``limit_s`` without one, or when closed."""
        end = time.monotonic() + limit_s
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
                    heapq.heappop(self._heap)  # the key has become due earlier, by a second entry
                if self._heap and self._heap[0][0] <= now:
                    _, key = heapq.heappop(self._heap)
                    del self._due[key]
                    return key
                if now >= end:
                    return None
                self._changed.wait(min(end, self._heap[0][0] if self._heap else end) - now)
            return None

    def close(self) -> None:
        """Ends every wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Controller:
    """Reconciles one job after the other, in a thread; retries later when that fails."""

    def __init__(self, cluster: Cluster, *, namespace: str | None, etcd_server: str | None) -> None:
        self.queue = Queue()
        self._cluster = cluster
        self._namespace = namespace
        self._etcd_server = etcd_server
        self._failures: dict[Key, int] = {}
        self._closing = threading.Event()
        self._thread = OwnThread(self._run, name="paddlejobs", say=LOGGER.error)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after its current job."""
        self._closing.set()
        self.queue.close()
        self._thread.join(_LONGEST_RETRY_S)

    def _run(self) -> None:
        listed_at = -RESYNC_S
        while not self._closing.is_set():
            if time.monotonic() - listed_at >= RESYNC_S:
                listed_at = time.monotonic()
                self._guarded(("", ""), self._list)
            key = self.queue.take(min(RESYNC_S, 5.0))
            if key is not None:
                self._guarded(key, partial(self.reconcile, *key))

    def _list(self) -> None:
        for key in self._cluster.jobs(self._namespace):
            self.queue.add(key)

    def _guarded(self, key: Key, act: Callable[[], None]) -> None:
        """Calls ``act``; an error is logged and the job retried, so that no job ends the thread."""
        try:
            act()
            self._failures.pop(key, None)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            delay_s = min(_FIRST_RETRY_S * 2 ** (failures - 1), _LONGEST_RETRY_S)
            known = isinstance(error, FleetError)
            LOGGER.log(
                logging.WARNING if known else logging.ERROR,
                "%s: %s; retrying in %.0f s",
                "/".join(key),
                error,
                delay_s,
                exc_info=not known,
            )
            if key != ("", ""):
                self.queue.add(key, delay_s)

    def reconcile(self, namespace: str, name: str) -> None:
        """Reconciles one job by one step; writes a refusal of the cluster or etcd to the status, then raises it."""
        document = self._cluster.job(namespace, name)
        if document is None:
            return
        observed = self._cluster.observe(document, uses_volcano=_asks_for_volcano(document))
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        plan = plan_reconcile(document, observed, now=now, etcd_server=self._etcd_server)
        failure: FleetError | None = None
        for action in plan.actions:
            LOGGER.info("%s/%s: %s %s %s", namespace, name, action.verb, action.kind, action.name)
            try:
                self._cluster.apply(namespace, action)
            except FleetError as error:
                failure = error
                break
        status = plan.status
        if failure is not None:
            status = {**(status or document.get("status") or {}), "message": f"{failure}"}
        if status is not None:
            self._cluster.write_status(namespace, name, status)
        if failure is not None:
            raise failure


def _asks_for_volcano(document: Document) -> bool:
    """Returns whether the job may have a PodGroup; called before the document is checked."""
    spec: Any = document.get("spec") or {}
    return "schedulingPolicy" in spec or VOLCANO in f"{spec}"
