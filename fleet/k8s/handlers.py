"""The operator's kopf handlers: the events that it watches, and its connection to the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import kopf

from fleet.k8s.cluster import Cluster, open_client
from fleet.k8s.controller import Controller
from fleet.k8s.objects import LABEL_JOB
from fleet.k8s.paddle_job import GROUP, KIND, PLURAL, VERSION
from fleet.k8s.size_record import forget_job, write_size


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the operator runs.

    Args:
        namespace: the one to watch; None watches all.
        etcd_server: host:port of etcd for elastic jobs.
        kubeconfig: kubeconfig file of the cluster; None uses the account of the pod.
    """

    namespace: str | None = None
    etcd_server: str | None = None
    kubeconfig: str | None = None


def register(registry: Any, options: Options) -> None:
    """Adds the operator's handlers to kopf's ``registry``.

    They only queue jobs; a separate thread reconciles them, so kopf writes nothing to any object.
    """
    running: list[Controller] = []

    @kopf.on.login(registry=registry)
    def login(**_: Any) -> kopf.ConnectionInfo:
        return connection(open_client(options.kubeconfig).configuration)

    @kopf.on.startup(registry=registry)
    def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        # kopf would write an event to the job for each message that it logs.
        settings.posting.enabled = False
        # kopf would list all namespaces, which an operator of one namespace need not be allowed to.
        settings.scanning.disabled = options.namespace is not None
        cluster = Cluster(
            open_client(options.kubeconfig),
            partial(write_size, options.etcd_server),
            partial(forget_job, options.etcd_server),
        )
        controller = Controller(cluster, namespace=options.namespace, etcd_server=options.etcd_server)
        running.append(controller)
        controller.start()

    @kopf.on.cleanup(registry=registry)
    def stop(**_: Any) -> None:
        while running:
            running.pop().close()

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_changed(namespace: str | None, name: str | None, **_: Any) -> None:
        _look_at(running, namespace, name)

    @kopf.on.event("", "v1", "pods", labels={LABEL_JOB: kopf.PRESENT}, registry=registry)
    async def pod_changed(namespace: str | None, meta: Mapping[str, Any], **_: Any) -> None:
        for owner in meta.get("ownerReferences") or []:
            if owner.get("kind") == KIND:
                _look_at(running, namespace, owner.get("name"))


def _look_at(running: list[Controller], namespace: str | None, name: str | None) -> None:
    for controller in running:
        if namespace and name:
            controller.queue.add((namespace, name))


def connection(configuration: Any) -> kopf.ConnectionInfo:
    """Returns kopf's connection to the cluster that the client's ``configuration`` names."""
    header = configuration.get_api_key_with_prefix("BearerToken")
    header = header or configuration.get_api_key_with_prefix("authorization") or ""
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme=scheme or None,
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
