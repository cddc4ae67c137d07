"""The operator's client against an API server over HTTP."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fleet.errors import FleetError
from fleet.k8s.controller import Controller
from tests.helpers.kube_api import ApiServer
from tests.helpers.kubernetes import EXAMPLES, crd, example, job_document

if TYPE_CHECKING:
    from fleet.k8s.cluster import Cluster

# The client is imported where a test runs: that alone takes two seconds.
missing = [name for name in ("kubernetes", "jsonschema") if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=f"needs {missing}: the extras k8s and dev")]


@pytest.fixture
def api() -> Iterator[ApiServer]:
    """An API server that knows PaddleJobs."""
    with ApiServer() as server:
        server.create(crd())
        yield server


@pytest.fixture
def sizes() -> list[tuple[str, int]]:
    """What was written to etcd."""
    return []


@pytest.fixture
def forgotten() -> list[str]:
    """Whose records were removed from etcd."""
    return []


@pytest.fixture
def cluster(api: ApiServer, tmp_path: Path, sizes: list[tuple[str, int]], forgotten: list[str]) -> Cluster:
    """The operator's view of it."""
    from fleet.k8s.cluster import Cluster, open_client

    path = tmp_path / "kubeconfig"
    path.write_text(api.kubeconfig())
    return Cluster(open_client(str(path)), lambda name, size: sizes.append((name, size)), forgotten.append)


@pytest.fixture
def controller(cluster: Cluster) -> Controller:
    """A controller whose thread does not run: each look is a call."""
    return Controller(cluster, namespace=None, etcd_server="etcd:2379")


def up(api: ApiServer, **status: Any) -> None:
    """Plays the kubelet: gives every pod an address and a status."""
    for index, name in enumerate(api.names("Pod")):
        given = {"podIP": f"10.0.0.{index + 1}", **status}
        api.store.patch(api.resource("Pod"), "default", name, {"status": given}, "status")


RUNS = {"phase": "Running", "containerStatuses": [{"name": "paddle", "ready": True}]}


def test_a_job_from_its_creation_to_its_end(api: ApiServer, controller: Controller, cluster: Cluster) -> None:
    """000-23: objects are made, the status is written, pods are deleted at the end."""
    api.create(job_document(2, 1, withGloo=1))
    assert cluster.jobs(None) == cluster.jobs("default") == [("default", "demo")]
    assert cluster.jobs("other") == []
    controller.reconcile("default", "demo")
    assert api.names("Pod") == ["demo-ps-0", "demo-worker-0", "demo-worker-1"]
    up(api, phase="Pending")
    controller.reconcile("default", "demo")
    assert api.get("ConfigMap", "demo")["data"]["PADDLE_TRAINERS"] == "10.0.0.2,10.0.0.3"
    up(api, **RUNS)
    controller.reconcile("default", "demo")
    status = api.get("PaddleJob", "demo")["status"]
    assert (status["phase"], status["mode"], status["worker"]["running"]) == ("Running", "PS", 2)
    up(api, phase="Succeeded")
    controller.reconcile("default", "demo")
    assert api.get("PaddleJob", "demo")["status"]["phase"] == "Completed"
    controller.reconcile("default", "demo")
    assert api.names("Pod") == []
    api.store.delete(api.resource("PaddleJob"), "default", "demo")
    assert api.names("ConfigMap") == []
    controller.reconcile("default", "demo")  # it is gone, and that is no error


def test_services_groups_and_sizes(
    api: ApiServer, controller: Controller, sizes: list[tuple[str, int]], forgotten: list[str]
) -> None:
    """000-26, 004-17."""
    api.create(job_document(1, intranet="Service"))
    controller.reconcile("default", "demo")
    assert api.names("Service") == ["demo-worker-0"]
    api.create(job_document(1, name="grow", elastic=1))
    controller.reconcile("default", "grow")
    change = {"spec": {"worker": {"replicas": 3}}}
    api.store.patch(api.resource("PaddleJob"), "default", "grow", change, "")
    controller.reconcile("default", "grow")
    assert (sizes, forgotten) == ([("default-grow", 3)], ["default-grow"])
    assert api.get("ConfigMap", "grow")["data"] == {"PADDLE_ELASTIC_NP": "3"}
    assert [name for name in api.names("Pod") if name.startswith("grow")] == [f"grow-worker-{i}" for i in range(3)]


def test_an_edit_reaches_the_group_of_volcano(api: ApiServer, controller: Controller) -> None:
    """004-17: over HTTP, as a merge patch, which is what custom resources take."""
    definition = copy.deepcopy(crd())
    definition["metadata"]["name"] = "podgroups.scheduling.volcano.sh"
    names = {
        "kind": "PodGroup",
        "listKind": "PodGroupList",
        "plural": "podgroups",
        "singular": "podgroup",
        "shortNames": [],
    }
    open_ended = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    text = {"type": "string"}
    fields = {"apiVersion": text, "kind": text, "metadata": open_ended, "spec": open_ended}
    schema = {"type": "object", "properties": fields}
    version = {"name": "v1beta1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    definition["spec"] |= {"group": "scheduling.volcano.sh", "names": names, "versions": [version]}
    api.create(definition)
    api.create(job_document(3, elastic=1, schedulingPolicy={"queue": "q"}))
    controller.reconcile("default", "demo")
    assert api.get("PodGroup", "demo")["spec"] == {"minMember": 3, "queue": "q"}
    change = {"spec": {"worker": {"replicas": 2}}}
    api.store.patch(api.resource("PaddleJob"), "default", "demo", change, "")
    controller.reconcile("default", "demo")
    assert api.get("PodGroup", "demo")["spec"] == {"minMember": 2, "queue": "q"}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if "volcano" not in name])
def test_pods_of_the_examples_are_made_as_they_stand(name: str, api: ApiServer, controller: Controller) -> None:
    """000-25: a number of GPUs is a number in YAML, and a newer cluster has fields that a client does not know."""
    document = example(name)
    spec = document["spec"]["worker"]["template"]["spec"]
    spec["containers"][0] |= {"fieldOfTomorrow": {"a": 1}}
    api.create(document)
    controller.reconcile("default", document["metadata"]["name"])
    made = api.get("Pod", f"{document['metadata']['name']}-worker-0")["spec"]["containers"][0]
    assert made["fieldOfTomorrow"] == {"a": 1}
    assert made.get("resources") == spec["containers"][0].get("resources")


def test_what_the_cluster_refuses_stands_in_the_status(api: ApiServer, controller: Controller) -> None:
    api.create(job_document(1))
    api.store.refused["pods"] = "exceeded quota: gpus"
    with pytest.raises(FleetError, match="exceeded quota: gpus"):
        controller.reconcile("default", "demo")
    status = api.get("PaddleJob", "demo")["status"]
    assert (status["phase"], status["message"]) == ("Pending", "The cluster refused: exceeded quota: gpus")
    api.store.refused.clear()
    controller.reconcile("default", "demo")
    assert api.names("Pod") == ["demo-worker-0"]
    assert api.get("PaddleJob", "demo")["status"]["message"] == ""


def test_objects_of_others_are_left_alone(api: ApiServer, controller: Controller) -> None:
    """A ConfigMap of the same name that the job does not own is neither read nor deleted."""
    api.create({"kind": "ConfigMap", "metadata": {"name": "demo"}, "data": {"mine": "1"}})
    api.create(job_document(1, intranet="Service"))
    with pytest.raises(FleetError, match="already exists"):
        controller.reconcile("default", "demo")
    assert api.get("ConfigMap", "demo")["data"] == {"mine": "1"}
    assert "already exists" in api.get("PaddleJob", "demo")["status"]["message"]


def test_a_job_that_the_definition_refuses_is_not_made(api: ApiServer) -> None:
    """000-26: the emulated server holds custom resources to the schema, as a real one does."""
    with pytest.raises(Exception, match="cleanPodPolicy"):
        api.create(job_document(1, cleanPodPolicy="Sometimes"))


def test_a_file_that_names_no_cluster(tmp_path: Path) -> None:
    from fleet.k8s.cluster import open_client

    with pytest.raises(FleetError, match="does not say where a cluster is"):
        open_client(str(tmp_path / "absent"))
