"""What the operator does next for an elastic job: its size on etcd, pods that come, go and are evicted."""

from __future__ import annotations

import pytest

from tests.fleet.k8s.test_reconcile import LATER, NOW, UP, World, job


@pytest.fixture(autouse=True)
def _needs_validator() -> None:
    pytest.importorskip("jsonschema")


def elastic(workers: int = 2) -> World:
    """Returns an elastic job that runs."""
    world = World(job(workers, elastic=1))
    world.step()
    world.set(UP)
    world.step()
    assert world.phase == "Running"
    return world


def test_an_elastic_job_starts_without_lists() -> None:
    """004-17: only its name, its size and etcd; the size is read anew at each start of a container."""
    world = elastic()
    container = world.pods["demo-worker-1"]["spec"]["containers"][0]
    assert "envFrom" not in container
    env = {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}
    assert env["PADDLE_ELASTIC_NP"] == {"configMapKeyRef": {"name": "demo", "key": "PADDLE_ELASTIC_NP"}}
    assert (env["PADDLE_ELASTIC_JOB_ID"], env["PADDLE_ELASTIC_TIMEOUT"]) == ("default-demo", "60")
    assert env["PADDLE_ELASTIC_SERVER"] == "etcd:2379"
    assert world.config_map is not None
    assert world.config_map["data"] == {"PADDLE_ELASTIC_NP": "2"}
    assert world.pods["demo-worker-1"]["spec"]["restartPolicy"] == "OnFailure"


def test_an_edit_of_replicas_scales_an_elastic_job() -> None:
    """004-17: etcd first, then the ConfigMap, then the pods; Scaling until all run."""
    world = elastic()
    world.document["spec"]["worker"]["replicas"] = 3
    assert world.step() == ["scale etcd default-demo", "patch ConfigMap demo", "create Pod demo-worker-2"]
    assert (world.sizes, world.phase) == ([3], "Scaling")
    world.set(UP)
    world.step()
    assert (world.phase, world.document["status"]["elastic"]) == ("Running", "3")
    world.document["spec"]["worker"]["replicas"] = 1
    assert world.step() == [
        "scale etcd default-demo", "patch ConfigMap demo", "delete Pod demo-worker-1", "delete Pod demo-worker-2",
    ]  # fmt: skip
    world.settle()
    assert (world.sizes, list(world.pods), world.phase) == ([3, 1], ["demo-worker-0"], "Running")


def test_an_edit_of_replicas_reaches_the_group_of_volcano() -> None:
    """004-17: with the old number, a pod that is made anew after a job shrank would never start."""
    world = World(job(3, elastic=1, schedulingPolicy={"queue": "q"}))
    world.step()
    world.set(UP)
    world.settle()
    world.document["spec"]["worker"]["replicas"] = 2
    assert world.step()[:3] == ["scale etcd default-demo", "patch PodGroup demo", "patch ConfigMap demo"]
    assert world.pod_group is not None
    assert world.pod_group["spec"] == {"minMember": 2, "queue": "q"}


def test_what_an_earlier_job_of_this_name_left_on_etcd_is_removed_once() -> None:
    """004-16, 004-17: its record says "complete" for ten minutes, and the new job's launchers would exit with 0."""
    world = World(job(2, elastic=1))
    assert world.step()[:2] == ["clean etcd default-demo", "create Secret demo-key-u1"]
    world.set(UP)
    world.settle()
    del world.pods["demo-worker-0"]
    world.settle()
    assert world.cleaned == ["default-demo"]
    assert World(job(2)).step()[0] == "create Secret demo-key-u1"


def test_an_elastic_pod_that_is_gone_is_made_again() -> None:
    world = elastic()
    del world.pods["demo-worker-0"]
    assert world.step() == ["create Pod demo-worker-0"]
    assert world.phase == "Scaling"


def test_an_evicted_pod_of_an_elastic_job_is_made_again() -> None:
    """000-26, 004-17: its containers do not start again; a pod that a node has just refused waits a little."""
    world = elastic()
    world.set({"phase": "Failed", "reason": "Evicted"}, "demo-worker-1")
    world.pods["demo-worker-1"]["metadata"]["creationTimestamp"] = NOW
    assert (world.step(NOW), world.phase) == ([], "Scaling")
    assert (world.step(LATER), world.phase) == (["delete Pod demo-worker-1"], "Scaling")
    assert world.step(LATER) == ["create Pod demo-worker-1"]
    world.set(UP)
    world.step(LATER)
    assert world.phase == "Running"
