"""How the operator reaches the cluster, and that kopf gets its handlers."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# kopf and the client are imported where a test runs: that alone takes seconds.
missing = [name for name in ("kopf", "kubernetes") if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=f"needs {missing}: the extra k8s")]


def registry_of_the_operator() -> Any:
    """Returns a registry with the operator's handlers."""
    import kopf

    from fleet.k8s.handlers import Options, register

    registry = kopf.OperatorRegistry()
    register(registry, Options())
    return registry


def test_kopf_gets_the_same_account_as_the_client(tmp_path: Path) -> None:
    from fleet.k8s.cluster import open_client
    from fleet.k8s.handlers import connection

    path = tmp_path / "kubeconfig"
    user = {"name": "u", "user": {"token": "secret"}}
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:8001"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    path.write_text(json.dumps({"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "x"}))
    made = connection(open_client(str(path)).configuration)
    assert (made.server, made.scheme, made.token) == ("http://127.0.0.1:8001", "Bearer", "secret")


def test_the_handlers_of_the_operator() -> None:
    """Watching only: with other handlers kopf would write its own annotations and finalizers to jobs and pods."""
    registry = registry_of_the_operator()
    assert [handler.id.rpartition(".")[2] for handler in registry._watching._handlers] == ["job_changed", "pod_changed"]
    for others in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert others._handlers == []
    job, pod = registry._watching._handlers
    assert (job.selector.group, job.selector.plural or job.selector.any_name) == (
        "batch.paddlepaddle.org",
        "paddlejobs",
    )
    assert list(pod.labels) == ["batch.paddlepaddle.org/job"]


def test_events_before_the_start_are_no_error() -> None:
    registry = registry_of_the_operator()
    job, pod = (handler.fn for handler in registry._watching._handlers)
    owned: dict[str, Any] = {"ownerReferences": [{"kind": "PaddleJob", "name": "demo"}, {"kind": "Other", "name": "x"}]}
    asyncio.run(job(namespace="default", name="demo"))
    asyncio.run(pod(namespace="default", meta=owned))


def test_the_module_for_kopf_run() -> None:
    import kopf

    from fleet.k8s.handlers import register

    before = kopf.get_default_registry()
    try:
        kopf.set_default_registry(kopf.OperatorRegistry())
        from fleet.k8s import operator

        assert operator.register is register
        assert len(kopf.get_default_registry()._watching._handlers) == 2
    finally:
        kopf.set_default_registry(before)
