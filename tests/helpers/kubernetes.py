"""Schemas of Kubernetes objects for tests, the files of deploy/, and the expected translations."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fleet.errors import UnsupportedOptionError
from fleet.k8s.paddle_job import read_job
from fleet.k8s.render import TARGETS, render
from tests.helpers.sources import ROOT

DEPLOY = ROOT / "deploy"
DATA = ROOT / "tests" / "data" / "kubernetes"
GOLDEN = DATA / "golden"
SEED_EXAMPLES = ("resnet", "wide_and_deep", "wide_and_deep_podip", "wide_and_deep_service", "wide_and_deep_volcano")
EXAMPLES = (*SEED_EXAMPLES, "elastic/resnet")
KUBERNETES = "1.34"
POD: dict[str, Any] = {"spec": {"containers": [{"name": "paddle", "image": "torch-fleet"}]}}


def job_document(workers: int = 2, servers: int = 0, name: str = "demo", **spec: Any) -> dict[str, Any]:
    """Returns a PaddleJob of one container per pod; ``spec`` adds fields or replaces them."""
    roles: dict[str, Any] = {"worker": {"replicas": workers, "template": copy.deepcopy(POD)}}
    if servers:
        roles["ps"] = {"replicas": servers, "template": copy.deepcopy(POD)}
    return {
        "apiVersion": "batch.paddlepaddle.org/v1",
        "kind": "PaddleJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {**roles, **spec},
    }


@cache
def crd() -> dict[str, Any]:
    """Returns the resource definition of ``deploy/v1``; it is not to be changed."""
    return read_yaml(DEPLOY / "v1" / "crd.yaml")[0]


def read_yaml(path: Path) -> list[dict[str, Any]]:
    """Returns the documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document is not None]


def example(name: str) -> dict[str, Any]:
    """Returns the PaddleJob of ``deploy/examples/NAME.yaml``, or of ``deploy/NAME.yaml`` when it has a folder."""
    (document,) = read_yaml(DEPLOY / ("" if "/" in name else "examples") / f"{name}.yaml")
    return document


def closed(schema: Any) -> Any:
    """Returns ``schema`` refusing fields that it does not name, as an API server prunes them."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        made["additionalProperties"] = False
    return made


@cache
def paddlejob_schema(version: str = "v1") -> Any:
    """Returns the closed schema of a PaddleJob in ``deploy/VERSION/crd.yaml``."""
    (crd,) = read_yaml(DEPLOY / version / "crd.yaml")
    schema = (
        crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        if version == "v1"
        else crd["spec"]["validation"]["openAPIV3Schema"]
    )
    # In the older interface the API server keeps fields that the schema does not name.
    return _with_open_metadata(closed(schema) if version == "v1" else copy.deepcopy(schema))


def _with_open_metadata(schema: Any) -> Any:
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def schema_errors(document: Mapping[str, Any], schema: Any) -> list[str]:
    """Returns what ``document`` breaks of ``schema``; skips where the validator is not installed."""
    import jsonschema

    return [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(document)
    ]


def check_object(document: Mapping[str, Any]) -> None:
    """Raises when an object of Kubernetes, JobSet, Kubeflow or Volcano is not what its schema says."""
    import kubernetes_validate

    known = {"JobSet": "jobset", "TrainJob": "trainjob", "TrainingRuntime": "trainingruntime"}
    kind = document["kind"]
    if kind == "PodGroup":
        return
    if kind not in known:
        kubernetes_validate.validate(json.loads(json.dumps(document)), KUBERNETES, strict=True)
        return
    stored = json.loads((DATA / f"{known[kind]}.json").read_text(encoding="utf-8"))
    errors = schema_errors(document, _with_open_metadata(closed(stored["schema"])))
    if document["apiVersion"] != f"{stored['group']}/{stored['version']}":
        errors.append(f"apiVersion: {document['apiVersion']}")
    if errors:
        raise AssertionError("; ".join(errors))
    for template in job_templates(document):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": template["spec"]}
        kubernetes_validate.validate(json.loads(json.dumps(job)), KUBERNETES, strict=True)


def job_templates(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the Job templates of a JobSet or TrainingRuntime."""
    spec = document["spec"]
    spec = spec.get("template", {}).get("spec", {}) if document["kind"] == "TrainingRuntime" else spec
    for replicated in spec.get("replicatedJobs", []):
        yield replicated["template"]


def golden_text(name: str, target: str) -> str:
    """Returns the translation of an example as text; a refusal is its message."""
    from fleet.k8s.yaml import write_documents

    try:
        made = render(read_job(example(name)), target)
    except UnsupportedOptionError as error:
        return f"{error}\n"
    notes = "".join(f"# note: {note}\n" for note in made.notes)
    return notes + write_documents(made.documents)


def golden_path(name: str, target: str) -> Path:
    """Returns where the expected translation of an example stands."""
    return GOLDEN / f"{name.replace('/', '_')}.{target}.yaml"


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in EXAMPLES:
        for kind in TARGETS:
            golden_path(each, kind).write_text(golden_text(each, kind), encoding="utf-8")
