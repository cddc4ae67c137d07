"""deploy/: the tree of the original, the resource definition in both versions, the examples against it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from fleet.k8s.contract import plan_elastic_variables
from fleet.k8s.objects import LABEL_JOB
from fleet.k8s.paddle_job import API_VERSION, GROUP, KIND, PLURAL, read_job
from tests.helpers.kubernetes import (
    DEPLOY,
    EXAMPLES,
    KUBERNETES,
    SEED_EXAMPLES,
    example,
    paddlejob_schema,
    read_yaml,
    schema_errors,
)
from tests.helpers.launching import read


def crd(version: str) -> dict[str, Any]:
    """Returns the resource definition of ``deploy/VERSION``."""
    (document,) = read_yaml(DEPLOY / version / "crd.yaml")
    return document


def test_the_tree() -> None:
    """000-24."""
    assert sorted(path.stem for path in (DEPLOY / "examples").glob("*.yaml")) == sorted(SEED_EXAMPLES)
    assert sorted(path.name for path in (DEPLOY / "elastic").iterdir()) == ["etcd.yaml", "resnet.yaml"]
    for version in ("v1", "v1beta1"):
        assert sorted(path.name for path in (DEPLOY / version).iterdir()) == ["crd.yaml", "operator.yaml"]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_the_names_of_the_resource(version: str) -> None:
    """000-23: what `kubectl get crd` and `kubectl get pdj` show."""
    document = crd(version)
    assert document["metadata"]["name"] == f"{PLURAL}.{GROUP}" == "paddlejobs.batch.paddlepaddle.org"
    names = document["spec"]["names"]
    assert (names["kind"], names["plural"], names["shortNames"]) == (KIND, PLURAL, ["pdj"])
    assert document["spec"]["scope"] == "Namespaced"
    columns = (
        document["spec"]["versions"][0]["additionalPrinterColumns"]
        if version == "v1"
        else document["spec"]["additionalPrinterColumns"]
    )
    assert [(c["name"], c.get("jsonPath") or c.get("JSONPath")) for c in columns] == [
        ("Status", ".status.phase"),
        ("Mode", ".status.mode"),
        ("Age", ".metadata.creationTimestamp"),
    ]


def test_both_versions_say_the_same() -> None:
    """Kubernetes up to 1.15 knows fewer keywords; apart from those the schema is one."""

    def common(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: common(v) for k, v in value.items() if not k.startswith("x-") and k != "additionalProperties"}
        return [common(item) for item in value] if isinstance(value, list) else value

    assert common(paddlejob_schema("v1")) == common(paddlejob_schema("v1beta1"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_satisfy_the_schema(name: str) -> None:
    """000-25."""
    pytest.importorskip("jsonschema")
    for version in ("v1", "v1beta1"):
        assert schema_errors(example(name), paddlejob_schema(version)) == []


def test_every_field_of_the_specification_is_in_the_schema() -> None:
    """000-26: the enumerations that the original lacks are here."""
    spec = paddlejob_schema()["properties"]["spec"]["properties"]
    assert set(spec) == {
        "cleanPodPolicy", "schedulingPolicy", "intranet", "withGloo", "elastic", "ps", "worker", "heter",
    }  # fmt: skip
    assert set(spec["schedulingPolicy"]["properties"]) == {"minAvailable", "queue", "priorityClass", "minResources"}
    assert set(spec["ps"]["properties"]) == {"replicas", "requests", "limits", "template"}
    assert spec["cleanPodPolicy"]["enum"] == ["Always", "Never", "OnFailure", "OnCompletion"]
    assert spec["withGloo"]["enum"] == [0, 1, 2]
    assert spec["intranet"]["enum"] == ["PodIP", "Service", "Host"]
    status = paddlejob_schema()["properties"]["status"]["properties"]
    assert set(status) >= {"phase", "mode", "ps", "worker", "heter", "elastic", "startTime", "completionTime"}
    assert "observedGeneration" in status


def test_the_pod_template_is_not_pruned() -> None:
    """The API server drops fields that a schema does not name; a pod has hundreds, and more with each release."""
    template = paddlejob_schema()["properties"]["spec"]["properties"]["worker"]["properties"]["template"]["properties"]
    container = template["spec"]["properties"]["containers"]["items"]
    for part in (template["metadata"], template["spec"], container):
        assert part["x-kubernetes-preserve-unknown-fields"] is True


def test_resnet_mounts_shared_memory() -> None:
    """000-27: NCCL and DataLoader workers need more than a container's 64 MB of /dev/shm."""
    pod = example("resnet")["spec"]["worker"]["template"]["spec"]
    assert {"mountPath": "/dev/shm", "name": "dshm"} in pod["containers"][0]["volumeMounts"]
    assert {"name": "dshm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_the_examples_start_the_launcher_and_the_parts_that_the_image_has() -> None:
    """000-28: the collective pod runs the launcher without a flag; scripts exist in the tree the image is made of."""
    resnet = example("resnet")["spec"]["worker"]["template"]["spec"]["containers"][0]
    assert resnet["args"][:2] == ["-m", "fleet.launch"]
    for name in EXAMPLES:
        for role in (role for key, role in example(name)["spec"].items() if key in ("ps", "worker")):
            container = role["template"]["spec"]["containers"][0]
            (script,) = [word for word in [*container["command"], *container.get("args", [])] if word.endswith(".py")]
            assert (DEPLOY.parent / script.removeprefix("/fleet/")).is_file(), script


@pytest.mark.parametrize("file", ["v1/crd.yaml", "v1/operator.yaml", "elastic/etcd.yaml"])
def test_what_is_installed_is_what_kubernetes_takes(file: str) -> None:
    """000-23."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for document in read_yaml(DEPLOY / file):
        validate(json.loads(json.dumps(document)), KUBERNETES, strict=True)


def test_the_older_definition_is_of_the_older_interface() -> None:
    """000-23: Kubernetes up to 1.15; no validator knows it any more, so only its form is looked at."""
    document = crd("v1beta1")
    assert document["apiVersion"] == "apiextensions.k8s.io/v1beta1"
    assert document["spec"]["version"] == "v1"
    assert f"{GROUP}/{document['spec']['versions'][0]['name']}" == API_VERSION
    assert "x-kubernetes" not in yaml.safe_dump(document)


def test_only_pods_of_jobs_and_the_operator_reach_the_etcd() -> None:
    """Issue 10, Medium 9: whoever may write there can stop and scale the jobs."""
    _, etcd, policy = read_yaml(DEPLOY / "elastic" / "etcd.yaml")
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"]["podSelector"]["matchLabels"] == etcd["spec"]["template"]["metadata"]["labels"]
    (rule,) = policy["spec"]["ingress"]
    assert rule["ports"] == [{"port": etcd["spec"]["template"]["spec"]["containers"][0]["ports"][0]["name"]}]
    pods, operator = rule["from"]
    assert pods["podSelector"]["matchExpressions"] == [{"key": LABEL_JOB, "operator": "Exists"}]
    (deployment,) = (d for d in read_yaml(DEPLOY / "v1" / "operator.yaml") if d["kind"] == "Deployment")
    assert operator["podSelector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert operator["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": deployment["metadata"]["namespace"]
    }


def test_the_elastic_example_finds_the_etcd_beside_it_and_keeps_its_checkpoints() -> None:
    """004-17: the service's name is what the launcher's variables are made of; a new pod finds the checkpoint."""
    service, etcd, _ = read_yaml(DEPLOY / "elastic" / "etcd.yaml")
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    pod = etcd["spec"]["template"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"] == etcd["spec"]["selector"]["matchLabels"]
    assert {item["containerPort"] for item in pod["spec"]["containers"][0]["ports"]} == {port}
    prefix = name.upper().replace("-", "_")
    job = example("elastic/resnet")
    env = {
        f"{prefix}_SERVICE_HOST": "10.0.0.9",
        f"{prefix}_SERVICE_PORT": f"{port}",
        **plan_elastic_variables(read_job(job), None),
        "PADDLE_ELASTIC_NP": f"{job['spec']['worker']['replicas']}",
    }
    container = job["spec"]["worker"]["template"]["spec"]["containers"][0]
    script = container["args"][2].removeprefix("/fleet/")
    config = read(script=(str(DEPLOY.parent / script),), env=env)
    elastic = config.elastic
    assert (elastic.is_elastic, elastic.is_scheduled, elastic.server) == (True, True, "10.0.0.9:2379")
    assert (config.nodes.min, config.nodes.max, config.job_id) == (2, 2, "default-resnet-elastic")
    shared = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    (volume,) = [v for v in job["spec"]["worker"]["template"]["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert container["args"][3].startswith(f"--checkpoint={shared[volume['name']]}/")
    user = job["spec"]["worker"]["template"]["spec"]["securityContext"]["fsGroup"]  # else the volume is root's alone
    assert f"useradd --uid {user} " in (DEPLOY / "Dockerfile").read_text()
