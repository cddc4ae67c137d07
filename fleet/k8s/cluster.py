"""The operator's view of the cluster: reads a job and its objects, carries out actions, writes the status."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import kubernetes.client
import kubernetes.config

from fleet.errors import FleetError
from fleet.k8s.objects import LABEL_JOB, SECRET_FIELD, Document
from fleet.k8s.paddle_job import GROUP, PLURAL, VERSION
from fleet.k8s.reconcile import CLEAN, CREATE, DELETE, PATCH, SCALE, ClusterAction, Observed

_TIMEOUT_S = 30.0
_NOT_FOUND = 404
_CONFLICT = 409
_KEY_BYTES = 32
_POD_GROUPS = ("scheduling.volcano.sh", "v1beta1", "podgroups")


class ClusterError(FleetError):
    """The API server refused a request; the text comes from the server."""


def open_client(kubeconfig: str | None) -> Any:
    """Returns a client of the cluster that the file ``kubeconfig`` names.

    Without the file it is the cluster of this pod or, outside a cluster, kubectl's current cluster.
    Raises ClusterError when no cluster is configured.
    """
    configuration = kubernetes.client.Configuration()
    loader: Any = kubernetes.config
    try:
        if kubeconfig is not None:
            loader.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        else:
            try:
                loader.load_incluster_config(client_configuration=configuration)
            except loader.ConfigException:
                loader.load_kube_config(client_configuration=configuration)
    except (loader.ConfigException, OSError) as error:
        where = f"--kubeconfig {kubeconfig}" if kubeconfig else "neither the account of a pod nor a kubeconfig file"
        raise ClusterError(f"{where} does not say where a cluster is: {error}") from error
    return kubernetes.client.ApiClient(configuration)


class Cluster:
    """Reads and changes the objects of PaddleJobs.

    Args:
        client: from :func:`open_client`.
        write_size: sets the size of a running elastic job in etcd; takes its name there and the number of pods.
        forget_job: removes what an elastic job with this name has left in etcd.
    """

    def __init__(self, client: Any, write_size: Callable[[str, int], None], forget_job: Callable[[str], None]) -> None:
        self._client = client
        self._core = kubernetes.client.CoreV1Api(client)
        self._custom = kubernetes.client.CustomObjectsApi(client)
        self._write_size = write_size
        self._forget_job = forget_job

    def job(self, namespace: str, name: str) -> Document | None:
        """Returns a PaddleJob; None when it is gone."""
        return self._found(self._custom.get_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL, name)

    def jobs(self, namespace: str | None) -> list[tuple[str, str]]:
        """Returns namespace and name of every PaddleJob in ``namespace``, or in all."""
        listed = (
            self._call(self._custom.list_cluster_custom_object, GROUP, VERSION, PLURAL)
            if namespace is None
            else self._call(self._custom.list_namespaced_custom_object, GROUP, VERSION, namespace, PLURAL)
        )
        return [(item["metadata"]["namespace"], item["metadata"]["name"]) for item in listed["items"]]

    def observe(self, document: Mapping[str, Any], *, uses_volcano: bool) -> Observed:
        """Returns the objects that belong to the job: those with its label that it owns."""
        metadata = document["metadata"]
        namespace = metadata["namespace"]
        name = metadata["name"]
        selector = {"label_selector": f"{LABEL_JOB}={name}"}
        group = None
        if uses_volcano:
            group = self._found(self._custom.get_namespaced_custom_object, *_at(namespace), name)
        config_map = self._found(self._core.read_namespaced_config_map, name, namespace)
        return Observed(
            pods=_owned(self._call(self._core.list_namespaced_pod, namespace, **selector)["items"], metadata),
            services=_owned(self._call(self._core.list_namespaced_service, namespace, **selector)["items"], metadata),
            config_map=next(iter(_owned([config_map] if config_map else [], metadata)), None),
            pod_group=next(iter(_owned([group] if group else [], metadata)), None),
        )

    def apply(self, namespace: str, action: ClusterAction) -> None:
        """Carries out one action; raises ClusterError with the server's reason, or FleetError from etcd."""
        if action.verb == SCALE:
            self._write_size(action.name, action.body["replicas"])
        elif action.verb == CLEAN:
            self._forget_job(action.name)
        elif action.verb == PATCH and action.kind == "PodGroup":
            patch = self._custom.patch_namespaced_custom_object
            self._call(patch, *_at(namespace), action.name, action.body)
        elif action.kind == "PodGroup":
            self._call(self._custom.create_namespaced_custom_object, *_at(namespace), action.body)
        elif action.kind == "Secret":
            self._create_secret(namespace, action.body)
        elif action.verb == CREATE and action.kind == "Pod":
            self._call(self._create_pod, namespace, action.body)
        elif action.verb == CREATE:
            self._call(getattr(self._core, f"create_namespaced_{_word(action.kind)}"), namespace, action.body)
        elif action.verb == PATCH:
            self._call(
                getattr(self._core, f"patch_namespaced_{_word(action.kind)}"), action.name, namespace, action.body
            )
        else:
            assert action.verb == DELETE
            self._found(getattr(self._core, f"delete_namespaced_{_word(action.kind)}"), action.name, namespace)

    def _create_pod(self, namespace: str, body: Document, **request: Any) -> Any:
        """Creates a pod from exactly ``body``, which the user wrote and the server checks.

        The client's own class refuses fields that it does not know, and device counts that are not strings.
        """
        configuration = self._client.configuration
        headers = {**self._client.default_headers, "Accept": "application/json", "Content-Type": "application/json"}
        headers |= {found["key"]: found["value"] for found in configuration.auth_settings().values()}
        answer = self._client.rest_client.request(
            "POST",
            f"{configuration.host}/api/v1/namespaces/{quote(namespace)}/pods",
            headers=headers,
            body=body,
            _request_timeout=request["_request_timeout"],
        )
        # Newer clients read on demand, and leave errors to the caller.
        if hasattr(answer, "read"):
            answer.read()
        if not 200 <= answer.status < 300:
            error = kubernetes.client.ApiException(status=answer.status, reason=answer.reason)
            error.body = answer.data
            raise error
        return answer

    def _create_secret(self, namespace: str, body: Document) -> None:
        """Creates the job's Secret with a new key, unless it exists; the operator has no right to read Secrets."""
        body = {**body, "stringData": {SECRET_FIELD: secrets.token_hex(_KEY_BYTES)}}
        try:
            self._call(self._core.create_namespaced_secret, namespace, body)
        except ClusterError as error:
            if _status(error) != _CONFLICT:
                raise

    def write_status(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """Writes the status of a job, unless the job is gone by now."""
        body = {"status": dict(status)}
        self._found(self._custom.patch_namespaced_custom_object_status, GROUP, VERSION, namespace, PLURAL, name, body)

    def _found(self, call: Callable[..., Any], *arguments: Any) -> Document | None:
        try:
            return self._call(call, *arguments)
        except ClusterError as error:
            if _status(error) == _NOT_FOUND:
                return None
            raise

    @staticmethod
    def _call(call: Callable[..., Any], *arguments: Any, **more: Any) -> Document:
        try:
            # The answer as text: the client's own classes would refuse fields that a newer server adds.
            answer = call(*arguments, **more, _preload_content=False, _request_timeout=_TIMEOUT_S)
        except kubernetes.client.ApiException as error:
            raise ClusterError(_reason(error)) from error
        document: Document = json.loads(answer.data)
        return document


def _status(error: ClusterError) -> int:
    cause = error.__cause__
    return int(cause.status or 0) if isinstance(cause, kubernetes.client.ApiException) else 0


def _at(namespace: str) -> tuple[str, str, str, str]:
    group, version, plural = _POD_GROUPS
    return group, version, namespace, plural


def _word(kind: str) -> str:
    return {"Pod": "pod", "Service": "service", "ConfigMap": "config_map"}[kind]


def _owned(items: list[Document], metadata: Mapping[str, Any]) -> list[Document]:
    return [
        item
        for item in items
        if any(owner.get("uid") == metadata["uid"] for owner in item["metadata"].get("ownerReferences") or [])
    ]


def _reason(error: Any) -> str:
    try:
        return f"The cluster refused: {json.loads(error.body)['message']}"
    except (TypeError, ValueError, KeyError):
        return f"The cluster answered {error.status} {error.reason}"
