"""Translations: what is refused, what stays the same, and that clusters take the result."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.k8s.paddle_job import read_job
from fleet.k8s.render import TARGETS, Rendered, gpus, host_name, render
from tests.helpers.kubernetes import (
    EXAMPLES,
    POD,
    SEED_EXAMPLES,
    check_object,
    example,
    golden_path,
    golden_text,
    job_document,
    job_templates,
)


def made(target: str, document: dict[str, Any] | None = None, etcd_server: str | None = None, **spec: Any) -> Rendered:
    """Returns the translation of a job."""
    return render(read_job(document or job_document(**spec)), target, etcd_server)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_translations_of_the_examples(name: str, target: str) -> None:
    """000-25: as stored; `python -m tests.helpers.kubernetes` writes them anew."""
    assert golden_text(name, target) == golden_path(name, target).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("resnet", "pods"),
        ("resnet", "trainjob"),
        ("elastic/resnet", "pods"),
        ("wide_and_deep_volcano", "jobset"),
        *(
            pytest.param(name, target, marks=pytest.mark.slow)
            for name in SEED_EXAMPLES
            for target in ("pods", "jobset")
        ),
    ],
)
def test_clusters_take_the_translations(name: str, target: str) -> None:
    """000-25: against the schemas of Kubernetes, JobSet and Kubeflow, unknown fields refused."""
    pytest.importorskip("kubernetes_validate")
    for document in made(target, example(name)).documents:
        check_object(document)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["pods", "jobset"])
@pytest.mark.parametrize("spec", [{"intranet": "Host"}, {"elastic": 1}, {"servers": 1, "withGloo": 2}])
def test_clusters_take_the_rarer_forms(target: str, spec: dict[str, Any]) -> None:
    pytest.importorskip("kubernetes_validate")
    for document in made(target, **spec).documents:
        check_object(document)


def test_the_check_finds_a_wrong_word() -> None:
    """The two tests above could not fail otherwise."""
    validator = pytest.importorskip("kubernetes_validate")
    pods, jobset = made("pods").documents, made("jobset").documents
    wrong = copy.deepcopy(pods[-1])
    wrong["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(validator.ValidationError):
        check_object(wrong)
    for path in (("spec", "successPolicyy"), ("spec", "network", "subdomains")):
        wrong = copy.deepcopy(jobset[0])
        inner = wrong
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = "x"
        with pytest.raises(AssertionError, match=path[-1]):
            check_object(wrong)


ELASTIC = {"elastic": 1}
ALWAYS = {"replicas": 2, "template": {"spec": {**POD["spec"], "restartPolicy": "Always"}}}
RANGE = {"replicas": 2, "requests": 1, "limits": 4, "template": POD}
GIVEN = {"replicas": 2, "template": {"spec": {"containers": [
    {"name": "a", "image": "x", "env": [{"name": "PET_NNODES", "value": "2"}]}]}}}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "spec", "reason"),
    [
        ("jobset", {"cleanPodPolicy": "Always"}, "also deletes the JobSet"),
        ("pods", {"cleanPodPolicy": "OnCompletion"}, "nothing watches plain pods"),
        ("trainjob", {"cleanPodPolicy": "OnFailure"}, "keeps its finished pods"),
        ("jobset", {"worker": ALWAYS}, "a Job refuses"),
        ("jobset", {"worker": RANGE, **ELASTIC}, "the size of a JobSet is fixed"),
        ("trainjob", {"servers": 1}, "no parameter servers"),
        ("trainjob", ELASTIC, "a fixed number of nodes"),
        ("trainjob", {"schedulingPolicy": {"queue": "a"}}, "podGroupPolicy"),
        ("trainjob", {"intranet": "Host"}, "two would clash"),
        ("trainjob", {"intranet": "Service"}, "Write restartPolicy: Never"),
        ("trainjob", {"worker": GIVEN}, "PET_NNODES, which Kubeflow sets"),
    ],
)
def test_what_a_target_cannot_do_is_refused(target: str, spec: dict[str, Any], reason: str) -> None:
    """000-26: a field that has no equivalent is never dropped."""
    with pytest.raises(UnsupportedOptionError, match=reason):
        made(target, **spec)


def test_an_unknown_target() -> None:
    with pytest.raises(ConfigError, match="--to is 'jobsets'.*Did you mean 'jobset'"):
        made("jobsets")


def test_the_rest_of_the_template_arrives_unchanged() -> None:
    """Volumes, resources, labels, further containers: only the first container gains variables."""
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "containers": [
                {
                    "name": "t",
                    "image": "x",
                    "env": [{"name": "MINE", "value": "1"}],
                    "resources": {"limits": {}},
                },
                {"name": "side", "image": "y"},
            ],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "restartPolicy": "Never",
        },
    }
    document = job_document(worker={"replicas": 2, "template": template})
    pods = [d for d in made("pods", document).documents if d["kind"] == "Pod"]
    (jobset,) = made("jobset", document).documents
    runtime = made("trainjob", document).documents[0]
    templates = [*pods, *(t["spec"]["template"] for d in (jobset, runtime) for t in job_templates(d))]
    assert len(templates) == 4
    for pod in templates:
        assert pod["spec"]["tolerations"] == template["spec"]["tolerations"]
        assert pod["spec"]["containers"][1] == {"name": "side", "image": "y"}
        assert pod["spec"]["containers"][0]["env"][0] == {"name": "MINE", "value": "1"}
        assert pod["spec"]["containers"][0]["resources"] == {"limits": {}}
        assert pod["metadata"]["labels"]["team"] == "a"
    assert document["spec"]["worker"]["template"]["spec"]["containers"][0]["env"] == [{"name": "MINE", "value": "1"}]


def test_workers_and_servers_under_volcano_start_together() -> None:
    """With dependsOn the group of four would wait for workers that are made only once the servers run."""
    group, jobset = made("jobset", example("wide_and_deep_volcano")).documents
    assert group["spec"] == {"minMember": 4, "queue": "default"}
    assert [job.get("dependsOn") for job in jobset["spec"]["replicatedJobs"]] == [None, None]
    (jobset,) = made("jobset", example("wide_and_deep")).documents
    assert jobset["spec"]["replicatedJobs"][1]["dependsOn"] == [{"name": "ps", "status": "Ready"}]


def test_elastic_jobs_know_their_etcd() -> None:
    """004-17."""
    for target in ("pods", "jobset"):
        document = made(target, etcd_server="etcd:2379", **ELASTIC).documents[-1]
        pod = document if target == "pods" else next(iter(job_templates(document)))["spec"]["template"]
        env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
        assert (env["PADDLE_ELASTIC_SERVER"], env["PADDLE_ELASTIC_JOB_ID"]) == ("etcd:2379", "default-demo")
        assert "PADDLE_TRAINER_ENDPOINTS" not in env
        assert pod["spec"]["restartPolicy"] == "OnFailure"


def test_the_parts() -> None:
    assert host_name(read_job(job_document(name="a")), "ps", "3") == "a-ps-0-3.a"
    assert [gpus({}), gpus({"resources": {"limits": {"nvidia.com/gpu": "4"}}})] == [0, 4]


def test_trainjobs_start_one_process_for_each_gpu() -> None:
    runtime, job = made("trainjob", example("resnet")).documents
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 1}
    document = example("resnet")
    document["spec"]["worker"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = 8
    assert made("trainjob", document).documents[1]["spec"]["trainer"]["numProcPerNode"] == 8
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("1a", "pods", "and --to is pods: the pods get services"),
        ("1a", "jobset", "and --to is jobset: the pods get services"),
        ("a" * 50, "jobset", "has 67 characters, and a jobset takes 63. Choose a name that is 4 shorter"),
        ("a" * 50, "trainjob", "has 65 characters, and a trainjob takes 63. Choose a name that is 2 shorter"),
    ],
)
def test_names_that_the_target_would_refuse_later(name: str, target: str, said: str) -> None:
    """000-25: JobSet makes host names of job, role, index and five random characters; services begin with a letter."""
    with pytest.raises(ConfigError, match=said):
        made(target, name=name)
    assert made("pods", name="a" * 50).documents
