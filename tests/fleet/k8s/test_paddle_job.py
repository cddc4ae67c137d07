"""What a PaddleJob may say."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fleet.errors import ConfigError, UnknownOptionError, UnsupportedOptionError
from fleet.k8s.paddle_job import RESERVED, read_job
from tests.helpers.kubernetes import EXAMPLES, POD, example, job_document, paddlejob_schema, schema_errors


def pod(**spec: Any) -> dict[str, Any]:
    """Returns a role's template whose pod has these fields."""
    return {"spec": {**copy.deepcopy(POD["spec"]), **spec}}


def worker(**fields: Any) -> dict[str, Any]:
    """Returns a worker role with these fields."""
    return {"worker": {"replicas": 2, "template": pod(), **fields}}


def test_the_modes() -> None:
    assert read_job(job_document(workers=1)).mode == "Single"
    assert read_job(job_document(workers=2)).mode == "Collective"
    assert read_job(job_document(workers=1, servers=1)).mode == "PS"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_jobs(name: str) -> None:
    """000-25."""
    job = read_job(example(name))
    assert [role.name for role in job.roles] == (["ps", "worker"] if name.startswith("wide") else ["worker"])
    assert (job.with_gloo, job.intranet, job.uses_volcano) == {
        "resnet": (0, None, False),
        "elastic/resnet": (0, None, False),
        "wide_and_deep": (1, None, False),
        "wide_and_deep_podip": (0, "PodIP", False),
        "wide_and_deep_service": (1, "Service", False),
        "wide_and_deep_volcano": (1, None, True),
    }[name]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"cleanPodPolicy": "Sometimes"}, "spec.cleanPodPolicy is 'Sometimes'; it takes Always, Never, OnFailure"),
    ({"intranet": "Podip"}, "Did you mean 'PodIP'"),
    ({"withGloo": 3}, "spec.withGloo is 3; it takes 0, 1, 2"),
    ({"withGloo": True}, "spec.withGloo is True"),
    ({"elastic": 2}, "spec.elastic is 2; it takes 0, 1"),
    ({"schedulingPolicy": {"minAvailable": 0}}, "minAvailable is 0; it takes an integer from 1"),
    (worker(replicas=0), "spec.worker.replicas is 0; it takes an integer from 1"),
    (worker(replicas="2"), "spec.worker.replicas is '2'"),
    (worker(template={"spec": {"containers": []}}), "at least one container"),
    (worker(template={"spec": {"containers": [{"name": "paddle"}]}}), r"containers\[0\].image is None"),
    (worker(template={}), "spec.worker.template.spec is None"),
]


@pytest.mark.parametrize(("spec", "message"), WRONG)
def test_what_is_wrong_is_said_by_us_and_by_the_crd(spec: dict[str, Any], message: str) -> None:
    """000-26: the schema that the API server enforces refuses the same, in both versions."""
    pytest.importorskip("jsonschema")
    document = job_document(**spec)
    with pytest.raises(ConfigError, match=message):
        read_job(document)
    assert schema_errors(document, paddlejob_schema("v1")) != []
    assert schema_errors(document, paddlejob_schema("v1beta1")) != []


@pytest.mark.parametrize("name", ["cleanPodPolicies", "replicas", "gloo"])
def test_a_field_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"spec.{name} is not a field"):
        read_job(job_document(**{name: 1}))
    with pytest.raises(UnknownOptionError, match="spec.worker.replica is not a field.*Did you mean 'replicas'"):
        read_job(job_document(**worker(replica=2)))


def test_a_job_has_workers() -> None:
    """000-25: a parameter-server job has ps and worker, a collective one worker."""
    document = job_document(servers=1)
    del document["spec"]["worker"]
    with pytest.raises(ConfigError, match="spec.worker is absent"):
        read_job(document)
    pytest.importorskip("jsonschema")
    assert schema_errors(document, paddlejob_schema()) == ["$.spec: 'worker' is a required property"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (job_document(withGloo=1), "withGloo is 1 in a job without ps"),
        (job_document(servers=1, elastic=1), "restarted servers have lost their parameters"),
        (job_document(**worker(requests=3)), "they are its bounds"),
        (job_document(**worker(limits=1)), "they are its bounds"),
        (job_document(**worker(template=pod(hostNetwork=True))), "Write intranet: Host"),
        (job_document(schedulingPolicy={}, **worker(template=pod(schedulerName="mine"))), "scheduled by Volcano"),
        (job_document(name="Demo"), "lower-case letters"),
        (job_document(name="a" * 60), "longer than the 63 characters"),
        ({**job_document(), "apiVersion": "kubeflow.org/v1"}, "must be a PaddleJob of batch.paddlepaddle.org/v1"),
        ([], "the document is"),
    ],
)
def test_what_contradicts_itself_is_refused(document: dict[str, Any], message: str) -> None:
    """000-26."""
    with pytest.raises(ConfigError, match=message):
        read_job(document)


def test_heterogeneous_workers_are_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedOptionError, match="workers of a job with servers may use GPUs"):
        read_job(job_document(servers=1, heter={"replicas": 1, "template": pod()}))


@pytest.mark.parametrize("name", RESERVED)
def test_a_variable_that_the_job_sets_is_refused(name: str) -> None:
    containers = [{"name": "paddle", "image": "x", "env": [{"name": name, "value": "1"}]}]
    with pytest.raises(ConfigError, match=f"sets {name}, which the job sets"):
        read_job(job_document(**worker(template={"spec": {"containers": containers}})))


def test_absent_and_zero_are_off() -> None:
    job = read_job(job_document(servers=1, withGloo=0, elastic=0, intranet="", cleanPodPolicy=None))
    assert (job.with_gloo, job.is_elastic, job.intranet, job.clean_pod_policy) == (0, False, None, None)
