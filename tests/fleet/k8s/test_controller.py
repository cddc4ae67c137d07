"""The queue, and the thread that outlives what a job does to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from fleet.errors import FleetError
from fleet.k8s.controller import Controller, Queue
from fleet.k8s.objects import Document
from fleet.k8s.reconcile import ClusterAction, Observed
from tests.helpers.kubernetes import job_document


def test_a_key_waits_once_and_the_earlier_time_counts() -> None:
    queue = Queue()
    queue.add(("a", "1"), 60)
    queue.add(("a", "2"))
    queue.add(("a", "1"))
    queue.add(("a", "1"), 30)
    assert [queue.take(0.1), queue.take(0.1), queue.take(0.0)] == [("a", "2"), ("a", "1"), None]


def test_a_key_that_is_not_due_is_waited_for() -> None:
    queue = Queue()
    began = time.monotonic()
    queue.add(("a", "1"), 0.2)
    assert queue.take(0.05) is None
    assert queue.take(5) == ("a", "1")
    assert 0.2 <= time.monotonic() - began < 4


def test_closing_ends_a_wait() -> None:
    queue = Queue()
    threading.Timer(0.1, queue.close).start()
    assert queue.take(20) is None


class FakeCluster:
    """One job; what it is asked to do is noted, and fails as told."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.status: Document = {}
        self.failures: list[Exception] = []

    def job(self, namespace: str, name: str) -> Document | None:
        document = job_document(1)
        document["metadata"]["uid"] = "u"
        return {**document, "status": self.status}

    def jobs(self, namespace: str | None) -> list[tuple[str, str]]:
        return [("default", "demo")]

    def observe(self, document: Document, *, uses_volcano: bool) -> Observed:
        return Observed()

    def apply(self, namespace: str, action: ClusterAction) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.done.append(f"{action.verb} {action.name}")

    def write_status(self, namespace: str, name: str, status: Document) -> None:
        self.status = status


def wait_for(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_job_is_looked_at_once_after_the_start() -> None:
    """An operator that was away finds the jobs that were made meanwhile."""
    cluster = FakeCluster()
    controller = Controller(cluster, namespace=None, etcd_server=None)
    controller.start()
    wait_for(lambda: "create demo-worker-0" in cluster.done)
    controller.close()
    assert cluster.status["phase"] == "Pending"


@pytest.mark.parametrize("error", [FleetError("quota"), RuntimeError("a bug")])
def test_a_failure_is_told_and_tried_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fleet.k8s.controller._FIRST_RETRY_S", 0.05)
    cluster = FakeCluster()
    cluster.failures = [error, error]
    controller = Controller(cluster, namespace=None, etcd_server=None)
    with caplog.at_level(logging.WARNING, logger="fleet.k8s"):
        controller.start()
        wait_for(lambda: "create demo-worker-0" in cluster.done)
        controller.close()
    delays = [record.getMessage() for record in caplog.records]
    assert len(delays) == 2
    assert all(f"default/demo: {error}; retrying in" in text for text in delays)
    if isinstance(error, FleetError):
        assert cluster.status["phase"] == "Pending"
