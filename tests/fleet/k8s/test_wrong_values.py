"""Every field of a PaddleJob and every argument of ``python -m fleet.k8s`` set to a wrong value: an error names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ConfigError
from fleet.k8s.__main__ import main
from fleet.k8s.paddle_job import read_job
from tests.helpers.kubernetes import job_document

ROLE, POD, CONTAINER = "spec.worker", "spec.worker.template.spec", "spec.worker.template.spec.containers[0]"


def place(document: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the mapping of ``document`` that ``where`` names."""
    found: Any = document
    for name in where.replace("[0]", ".0").split("."):
        found = found[int(name) if name.isdigit() else name]
    return found


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("metadata", "name", "A_b"),
        ("metadata", "name", None),
        ("metadata", "name", "a" * 70),
        ("metadata", "namespace", "A b"),
        ("metadata", "labels", 3),
        ("spec", "cleanPodPolicy", "Sometimes"),
        ("spec", "intranet", "podip"),
        ("spec", "withGloo", 3),
        ("spec", "elastic", 2),
        ("spec", "elastic", True),
        ("spec", "replicaz", 3),
        ("spec", "worker", 3),
        ("spec", "schedulingPolicy", 3),
        (ROLE, "replicas", 0),
        (ROLE, "replicas", "2"),
        (ROLE, "requests", "x"),
        (ROLE, "limits", -1),
        (ROLE, "template", None),
        (ROLE, "replica", 2),
        (POD, "containers", []),
        (POD, "hostNetwork", True),
        (POD, "restartPolicy", "Sometimes"),
        (CONTAINER, "name", 3),
        (CONTAINER, "image", None),
        (CONTAINER, "env", 3),
        (CONTAINER, "env", [{"name": "PADDLE_TRAINER_ID", "value": "1"}]),
        (CONTAINER, "env", [{"value": "1"}]),
        (CONTAINER, "env", ["A=1"]),
        (CONTAINER, "envFrom", {"configMapRef": {"name": "x"}}),
        (CONTAINER, "ports", "80"),
        (CONTAINER, "resources", "2"),
        (CONTAINER, "resources", {"limits": ["x"]}),
        (POD, "hostname", "a"),
        (POD, "subdomain", "a"),
        (f"{ROLE}.template", "metadata", "x"),
        (f"{ROLE}.template", "metadata", {"labels": ["x"]}),
        (f"{ROLE}.template", "metadata", {"annotations": "x"}),
    ],
)
def test_a_field(where: str, name: str, value: object) -> None:
    document = job_document()
    place(document, where)[name] = value
    with pytest.raises(ConfigError) as caught:
        read_job(document)
    assert f"{where}.{name}" in f"{caught.value}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("minAvailable", 0),
        ("minAvailable", 3),
        ("queue", 3),
        ("priorityClass", 3),
        ("minResources", 3),
        ("minMember", 3),
    ],
)
def test_a_field_of_the_scheduling_policy(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"spec\.schedulingPolicy\.{name}"):
        read_job(job_document(schedulingPolicy={name: value}))


@pytest.mark.parametrize("fields", [{"intranet": "Service"}, {"intranet": "PodIP"}])
def test_more_pods_than_a_variable_can_name(fields: dict[str, Any]) -> None:
    """Linux takes 128 KiB in one variable of a process; the containers of such a job would never start."""
    with pytest.raises(ConfigError, match=r"spec\.worker\.replicas is 7000: .* the limit is 130972"):
        read_job(job_document(7000, **fields))
    assert read_job(job_document(5000, **fields)).worker.replicas == 5000
    assert read_job(job_document(7000, elastic=1)).worker.replicas == 7000


def test_services_begin_with_a_letter() -> None:
    assert read_job(job_document(name="1a")).name == "1a"
    with pytest.raises(ConfigError, match=r"metadata\.name is '1a' and spec\.intranet is Service"):
        read_job(job_document(name="1a", intranet="Service"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("render", "{job}", "--to", "jobsets"), "--to is 'jobsets'"),
        (("render", "{missing}", "--to", "pods"), "cannot be read"),
        (("render", "{elastic}", "--to", "pods", "--etcd-server", "nonsense"), "--etcd-server has 'nonsense'"),
        (("render", "{job}", "--to", "pods", "--etcd-server", "10.0.0.1:2379"), "no job in the file has elastic: 1"),
        (("check", "{missing}"), "cannot be read"),
        (("operator", "--etcd-server", "nonsense"), "--etcd-server has 'nonsense'"),
        (("operator", "--namespace", "A b"), "--namespace is 'A b'"),
        (("operator", "--kubeconfig", "{missing}"), "no such file exists"),
        (("operator", "--liveness", "8081"), "--liveness is '8081'"),
    ],
)
def test_an_argument(words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {name: tmp_path / name for name in ("job", "elastic", "missing")}
    names["job"].write_text(json.dumps(job_document()))
    names["elastic"].write_text(json.dumps(job_document(elastic=1)))
    assert main([word.format(**names) for word in words]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.out == ""
