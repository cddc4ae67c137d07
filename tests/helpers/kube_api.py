"""A small Kubernetes API server for tests, over HTTP: discovery, objects, merge patches, watches, tables.

No admission, no accounts, no controllers: whoever tests plays the kubelet.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.helpers.kube_store import ApiError, Document, Resource, Store, selected, table

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
