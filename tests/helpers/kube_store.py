"""The objects of a small Kubernetes for tests: kept in memory, held to the schemas of their definitions.

Custom resources exist once their definition was added. What an owner owns goes with it.
"""

from __future__ import annotations

import copy
import json
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

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
    Resource("", "v1", "secrets", "Secret", has_status=False),
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
        self.create(self.find("", "v1", "namespaces"), "", {"metadata": {"name": "default"}})

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
