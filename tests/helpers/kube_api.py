"""A small Kubernetes API server for tests: discovery, objects, patches, watches, tables, definitions with schemas.

Objects lie in memory. Custom resources exist once their definition was posted, and are held to its schema. What an
owner owns goes with it. No admission, no accounts, no controllers: whoever tests plays the kubelet.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.helpers.kubernetes import closed, schema_errors

Document = dict[str, Any]
CREATED = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Resource:
    """One kind of object and where it is reached."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    short: tuple[str, ...] = ()
    has_status: bool = True
    columns: tuple[tuple[str, str], ...] = ()

    @property
    def api_version(self) -> str:
        """Group and version as objects name them."""
        return f"{self.group}/{self.version}" if self.group else self.version


BUILT_IN = (
    Resource("", "v1", "pods", "Pod", columns=(("Status", ".status.phase"),)),
    Resource("", "v1", "services", "Service"),
    Resource("", "v1", "configmaps", "ConfigMap", has_status=False),
    Resource("", "v1", "events", "Event", has_status=False),
    Resource("", "v1", "namespaces", "Namespace", namespaced=False),
    Resource(
        "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False, ("crd", "crds")
    ),
)


class ApiError(Exception):
    """An answer that is not a success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


@cache
def held_to(text: str) -> Any:
    """Returns the closed form of a schema."""
    schema = closed(json.loads(text))
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


class Store:
    """The objects and everything that happened to them."""

    def __init__(self) -> None:
        self.resources: list[Resource] = list(BUILT_IN)
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[tuple[str, str, str], Document] = {}
        self.events: list[tuple[int, str, str, Document]] = []
        self.refused: dict[str, str] = {}
        self.revision = 0
        self._schemas: dict[str, Any] = {}
        self.create(BUILT_IN[4], "", {"metadata": {"name": "default"}})

    def find(self, group: str, version: str, plural: str) -> Resource:
        """Returns a resource by its place."""
        for resource in self.resources:
            if (resource.group, resource.version, resource.plural) == (group, version, plural):
                return resource
        raise ApiError(404, "NotFound", f"the server could not find the requested resource {plural}.{group}")

    def create(self, resource: Resource, namespace: str, document: Document) -> Document:
        """Adds an object."""
        with self.changed:
            if resource.plural in self.refused:
                raise ApiError(403, "Forbidden", self.refused[resource.plural])
            document = copy.deepcopy(document)
            metadata = document.setdefault("metadata", {})
            key = (resource.plural, namespace, metadata["name"])
            if key in self.objects:
                raise ApiError(409, "AlreadyExists", f'{resource.plural} "{metadata["name"]}" already exists')
            if resource.namespaced:
                metadata["namespace"] = namespace
            metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": CREATED, "generation": 1}
            if resource.has_status and resource.kind != "Pod":
                document.pop("status", None)
            self._check(resource, document)
            document = {"apiVersion": resource.api_version, "kind": resource.kind, **document}
            if resource.kind == "CustomResourceDefinition":
                self._define(document)
            return self._keep("ADDED", key, document)

    def _define(self, crd: Document) -> None:
        spec, names = crd["spec"], crd["spec"]["names"]
        version = spec["versions"][0]
        columns = tuple((c["name"], c["jsonPath"]) for c in version.get("additionalPrinterColumns", []))
        made = Resource(
            spec["group"],
            version["name"],
            names["plural"],
            names["kind"],
            True,
            tuple(names["shortNames"]),
            True,
            columns,
        )
        self.resources.append(made)
        self._schemas[made.plural] = held_to(json.dumps(version["schema"]["openAPIV3Schema"]))
        conditions = [{"type": kind, "status": "True", "reason": "x"} for kind in ("NamesAccepted", "Established")]
        crd["status"] = {"conditions": conditions, "acceptedNames": names}

    def _check(self, resource: Resource, document: Document) -> None:
        schema = self._schemas.get(resource.plural)
        errors = schema_errors(document, schema) if schema else []
        if errors:
            raise ApiError(422, "Invalid", f'{resource.kind} "{document["metadata"]["name"]}" is invalid: {errors[0]}')

    def patch(self, resource: Resource, namespace: str, name: str, change: Document, part: str) -> Document:
        """Merges ``change`` into an object; ``part`` is "status", or empty for all but the status."""
        with self.changed:
            old = self.get(resource, namespace, name)
            change = {"status": change.get("status")} if part == "status" else dict(change)
            if not part and resource.has_status:
                change.pop("status", None)
            new = merged(old, change)
            self._check(resource, new)
            if new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] += 1
            return old if new == old else self._keep("MODIFIED", (resource.plural, namespace, name), new)

    def get(self, resource: Resource, namespace: str, name: str) -> Document:
        """Returns an object."""
        found = self.objects.get((resource.plural, namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", f'{resource.plural}.{resource.group} "{name}" not found')
        return copy.deepcopy(found)

    def delete(self, resource: Resource, namespace: str, name: str) -> Document:
        """Removes an object and, after it, what it owns."""
        with self.changed:
            gone = self.get(resource, namespace, name)
            del self.objects[resource.plural, namespace, name]
            self._event("DELETED", resource.plural, gone)
            uid = gone["metadata"]["uid"]
            for (plural, space, owned), document in list(self.objects.items()):
                owners = document["metadata"].get("ownerReferences", [])
                if any(owner["uid"] == uid for owner in owners) and (plural, space, owned) in self.objects:
                    self.delete(next(r for r in self.resources if r.plural == plural), space, owned)
            return gone

    def list(self, resource: Resource, namespace: str, query: Mapping[str, str]) -> list[Document]:
        """Returns the objects that a query selects."""
        with self.changed:
            return [
                copy.deepcopy(document)
                for (plural, space, _), document in sorted(self.objects.items())
                if plural == resource.plural and namespace in ("", space) and selected(document, query)
            ]

    def _keep(self, verb: str, key: tuple[str, str, str], document: Document) -> Document:
        self.objects[key] = document
        self._event(verb, key[0], document)
        return copy.deepcopy(document)

    def _event(self, verb: str, plural: str, document: Document) -> None:
        self.revision += 1
        document["metadata"]["resourceVersion"] = str(self.revision)
        self.events.append((self.revision, verb, plural, copy.deepcopy(document)))
        self.changed.notify_all()


def merged(old: Any, change: Any) -> Any:
    """Returns ``old`` with a merge patch applied: None removes a field."""
    if not isinstance(change, dict) or not isinstance(old, dict):
        return copy.deepcopy(change)
    made = dict(old)
    for key, value in change.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), value)
    return made


def selected(document: Document, query: Mapping[str, str]) -> bool:
    """Returns whether label and field selectors of a query fit."""
    labels = document["metadata"].get("labels", {})
    for part in filter(None, query.get("labelSelector", "").split(",")):
        name, equals, value = part.partition("=")
        if (equals and labels.get(name) != value.lstrip("=")) or (not equals and name not in labels):
            return False
    for part in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = part.partition("=")
        if name == "metadata.name" and document["metadata"]["name"] != value:
            return False
    return True


def table(resource: Resource, documents: list[Document]) -> Document:
    """Returns what ``kubectl get`` prints: the name and the columns of the definition."""
    columns = resource.columns or (("Age", ".metadata.creationTimestamp"),)
    rows = []
    for document in documents:
        cells: list[Any] = [document["metadata"]["name"]]
        for _, path in columns:
            value: Any = document
            for key in path.strip(".").split("."):
                value = value.get(key, {}) if isinstance(value, dict) else {}
            cells.append("" if value == {} else value)
        rows.append(
            {"cells": cells, "object": {**document, "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}}
        )
    definitions = [
        {"name": name, "type": "string", "format": "", "description": "", "priority": 0}
        for name, _ in (("Name", ""), *columns)
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {},
        "columnDefinitions": definitions,
        "rows": rows,
    }


_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/.))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<part>status))?$"
)


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        """Discovery, one object, a list or a watch."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """A new object."""
        self._answer(lambda place, query, body: (201, self.store.create(place[0], place[1], body)))

    def do_PATCH(self) -> None:
        """A merge patch."""
        self._answer(lambda place, query, body: (200, self.store.patch(*place[:3], body, place[3])))

    def do_DELETE(self) -> None:
        """A deletion."""
        self._answer(lambda place, query, body: (200, self.store.delete(*place[:3])))

    def _answer(self, act: Any) -> None:
        split = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(split.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        try:
            known = discovery(self.store, split.path)
            if known is not None:
                return self._send(200, known)
            found = _PATH.fullmatch(split.path)
            if found is None:
                raise ApiError(404, "NotFound", f"no such path {split.path}")
            group, version = (found["group"] or "", found["core"] or found["version"])
            resource = self.store.find(group, version, found["plural"])
            answer = act((resource, found["namespace"] or "", found["name"], found["part"] or ""), query, body)
            if answer is not None:
                self._send(*answer)
        except ApiError as error:
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            self._send(error.code, {**status, "message": str(error), "reason": error.reason, "code": error.code})
        return None

    def _get(self, place: Any, query: Mapping[str, str], body: Any) -> tuple[int, Document] | None:
        resource, namespace, name, _ = place
        if query.get("watch") in ("true", "1"):
            self._watch(resource, namespace, query)
            return None
        documents = [self.store.get(resource, namespace, name)] if name else self.store.list(resource, namespace, query)
        if "as=Table" in self.headers.get("Accept", ""):
            return 200, table(resource, documents)
        if name:
            return 200, documents[0]
        metadata = {"resourceVersion": str(self.store.revision)}
        return 200, {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": metadata,
            "items": documents,
        }

    def _watch(self, resource: Resource, namespace: str, query: Mapping[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        seen = int(query.get("resourceVersion") or 0)
        try:
            for event in self._news(seen):
                revision, verb, plural, document = event
                space = document["metadata"].get("namespace", "")
                if plural == resource.plural and namespace in ("", space) and selected(document, query):
                    self.wfile.write(json.dumps({"type": verb, "object": document}).encode() + b"\n")
                    self.wfile.flush()
        except OSError:
            return  # the watcher went away

    def _news(self, seen: int) -> Iterator[tuple[int, str, str, Document]]:
        server = self.server
        while not getattr(server, "closing", False):
            with self.store.changed:
                fresh = [event for event in self.store.events if event[0] > seen]
                if not fresh:
                    self.store.changed.wait(0.2)
            for event in fresh:
                seen = event[0]
                yield event

    def _send(self, code: int, document: Document) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def discovery(store: Store, path: str) -> Document | None:
    """Returns what the server can do; None for a path that is not about that."""
    groups = sorted({(r.group, r.version) for r in store.resources if r.group})
    if path == "/version":
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        listed = [_group(group, version) for group, version in groups]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    for group, version in [("", "v1"), *groups]:
        if path == (f"/apis/{group}/{version}" if group else "/api/v1"):
            own = [r for r in store.resources if (r.group, r.version) == (group, version)]
            joined = f"{group}/{version}" if group else version
            resources = [entry for r in own for entry in _entries(r)]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": joined, "resources": resources}
    return None


def _group(group: str, version: str) -> Document:
    one = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [one], "preferredVersion": one}


def _entries(resource: Resource) -> list[Document]:
    verbs = ["get", "list", "watch", "create", "patch", "delete"]
    entry = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": verbs,
        "shortNames": list(resource.short),
    }
    return [
        entry,
        *([{**entry, "name": f"{resource.plural}/status", "verbs": ["get", "patch"]}] if resource.has_status else []),
    ]


class ApiServer:
    """Serves a store on a free port of 127.0.0.1; use it as a context."""

    def __init__(self) -> None:
        self.store = Store()
        handler = type("BoundHandler", (Handler,), {"store": self.store})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.closing = True  # type: ignore[attr-defined]
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def kubeconfig(self) -> str:
        """Returns a kubeconfig file's text."""
        return json.dumps({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            "current-context": "x",
        })  # fmt: skip

    def resource(self, kind: str) -> Resource:
        """Returns a resource by its kind."""
        return next(resource for resource in self.store.resources if resource.kind == kind)

    def get(self, kind: str, name: str) -> Document:
        """Returns an object of the namespace default."""
        return self.store.get(self.resource(kind), "default", name)

    def create(self, document: Document) -> Document:
        """Adds an object to the namespace default."""
        resource = self.resource(document["kind"])
        return self.store.create(resource, "default" if resource.namespaced else "", document)

    def names(self, kind: str) -> list[str]:
        """Returns the names of the objects of a kind."""
        return [d["metadata"]["name"] for d in self.store.list(self.resource(kind), "", {})]
