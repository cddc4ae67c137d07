"""What the operator does next, by tables: job and objects in, actions and status out."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from fleet.k8s.reconcile import ClusterAction, ClusterPlan, Observed, plan_reconcile
from tests.helpers.kubernetes import POD, job_document, paddlejob_schema, schema_errors

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
UP = {"phase": "Running", "containerStatuses": [{"name": "paddle", "ready": True, "state": {"running": {}}}]}
DOWN = {"phase": "Failed", "containerStatuses": [{"name": "paddle", "state": {"terminated": {"exitCode": 7}}}]}
STARTING = {"phase": "Running", "containerStatuses": [{"name": "paddle", "ready": False}]}
DONE = {"phase": "Succeeded"}


def job(workers: int = 2, servers: int = 0, status: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """Returns a job as the cluster holds it."""
    document = job_document(workers, servers, **spec)
    document["metadata"] |= {"uid": "u1", "generation": 1}
    return {**document, **({"status": status} if status else {})}


VARIABLES = {
    "PADDLE_PORT": "36000",
    "TRAINER_PORTS_NUM": "20",
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:36000",
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.2:36000,10.0.0.3:36000",
    "PADDLE_TRAINERS": "10.0.0.2,10.0.0.3",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_WITH_GLOO": "1",
    "PADDLE_GLOO_RENDEZVOUS": "3",
    "PADDLE_GLOO_HTTP_ENDPOINT": "10.0.0.1:36018",
}


class World:
    """A cluster of one job, played by hand: actions are carried out, pods get addresses and states."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.pods: dict[str, dict[str, Any]] = {}
        self.services: dict[str, dict[str, Any]] = {}
        self.config_map: dict[str, Any] | None = None
        self.pod_group: dict[str, Any] | None = None
        self.sizes: list[int] = []
        self.secrets: list[str] = []
        self.cleaned: list[str] = []

    def plan(self, now: str = NOW) -> ClusterPlan:
        """Returns what there is to do, without doing it."""
        observed = Observed(list(self.pods.values()), list(self.services.values()), self.config_map, self.pod_group)
        before = copy.deepcopy((self.document, observed))
        plan = plan_reconcile(self.document, observed, now=now, etcd_server="etcd:2379")
        assert (self.document, observed) == before
        return plan

    def step(self, now: str = NOW) -> list[str]:
        """Does it; returns the actions as words."""
        plan = self.plan(now)
        for action in plan.actions:
            self._carry_out(action)
        if plan.status is not None:
            assert schema_errors(plan.status, paddlejob_schema()["properties"]["status"]) == []
            self.document["status"] = plan.status
        return [f"{action.verb} {action.kind} {action.name}" for action in plan.actions]

    def _carry_out(self, action: ClusterAction) -> None:
        if action.verb == "scale":
            self.sizes.append(action.body["replicas"])
        elif action.verb == "clean":
            self.cleaned.append(action.name)
        elif action.kind == "ConfigMap" and self.config_map is not None:
            self.config_map["data"] |= action.body["data"]
        elif action.kind == "ConfigMap":
            self.config_map = copy.deepcopy(action.body)
        elif action.kind == "PodGroup" and self.pod_group is not None:
            self.pod_group["spec"] |= action.body["spec"]
        elif action.kind == "PodGroup":
            self.pod_group = copy.deepcopy(action.body)
        elif action.kind == "Secret":
            assert "data" not in action.body
            assert "stringData" not in action.body  # nothing secret goes through a plan, which may be logged
            self.secrets.append(action.name)
        else:
            place = self.pods if action.kind == "Pod" else self.services
            if action.verb == "create":
                assert action.name not in place
                place[action.name] = copy.deepcopy(action.body)
            else:
                del place[action.name]

    def settle(self) -> None:
        """Steps until there is nothing left to do."""
        for _ in range(5):
            if not self.step() and self.plan().status is None:
                return
        raise AssertionError("it never comes to rest")

    def set(self, status: Mapping[str, Any], *names: str) -> None:
        """Gives pods (all of them without names) an address and this status."""
        for index, (name, pod) in enumerate(self.pods.items()):
            if not names or name in names:
                addresses = {"podIP": f"10.0.0.{index + 1}", "hostIP": f"10.9.0.{index + 1}"}
                pod["status"] = {**addresses, **copy.deepcopy(dict(status))}

    @property
    def phase(self) -> str:
        """The job's phase."""
        return str(self.document["status"]["phase"])


@pytest.fixture(autouse=True)
def _needs_validator() -> None:
    pytest.importorskip("jsonschema")


def test_the_life_of_a_job_with_servers() -> None:
    """000-23 and E.2 to E.4: pods, addresses, ConfigMap, Running, Completed only when the servers ended too."""
    world = World(job(servers=1, withGloo=1))
    assert world.step() == [
        "create Secret demo-key-u1",
        "create Pod demo-ps-0",
        "create Pod demo-worker-0",
        "create Pod demo-worker-1",
    ]
    assert world.document["status"] | {"worker": 0, "ps": 0} == {
        "phase": "Pending", "mode": "PS", "message": "", "ps": 0, "worker": 0, "observedGeneration": 1,
    }  # fmt: skip
    world.settle()
    assert world.config_map is None  # the pods have no addresses
    world.set({"phase": "Pending"})
    assert world.step() == ["create ConfigMap demo"]
    assert world.config_map is not None
    assert world.config_map["data"] == VARIABLES
    world.set(STARTING)
    world.step()
    assert world.phase == "Starting"
    world.set(UP)
    world.step()
    assert (world.phase, world.document["status"]["startTime"]) == ("Running", NOW)
    world.set(DONE, "demo-worker-0", "demo-worker-1")
    world.step(LATER)
    assert world.phase == "Running"  # a server still runs
    world.set(DONE)
    world.step(LATER)
    assert (world.phase, world.document["status"]["completionTime"]) == ("Completed", LATER)
    assert world.document["status"]["startTime"] == NOW
    assert world.document["status"]["ps"]["succeeded"] == 1
    assert [ref["name"] for ref in world.document["status"]["worker"]["refs"]] == ["demo-worker-0", "demo-worker-1"]


def test_a_job_that_was_never_seen_running_has_a_start() -> None:
    """000-28: it ended between two looks at its pods."""
    world = World(job(intranet="Service"))
    world.settle()
    world.set({**DONE, "startTime": "2020-02-02T02:02:02Z"})
    world.step(LATER)
    status = world.document["status"]
    assert (status["startTime"], status["completionTime"]) == ("2020-02-02T02:02:02Z", LATER)


@pytest.mark.parametrize(
    ("policy", "deleted_after"),
    [
        ("Always", {"Completed", "Failed"}),
        ("Never", set()),
        ("OnFailure", {"Failed"}),
        ("OnCompletion", {"Completed"}),
        (None, {"Completed"}),
    ],
)
def test_when_pods_are_deleted(policy: str | None, deleted_after: set[str]) -> None:
    """000-26: cleanPodPolicy; the status stays as it was at the end."""
    for end, status in (("Completed", DONE), ("Failed", DOWN)):
        world = World(job(cleanPodPolicy=policy, intranet="Service"))
        world.settle()
        world.set(status)
        world.step()
        assert world.phase == end
        kept = copy.deepcopy(world.document["status"])
        world.settle()
        assert (world.pods == {}) == (world.services == {}) == (end in deleted_after)
        assert world.document["status"] == kept


def test_a_failed_pod_is_named_with_its_code() -> None:
    world = World(job())
    world.step()
    world.set(UP)
    world.step()
    world.set(DOWN, "demo-worker-1")
    world.step()
    assert world.phase == "Failed"
    assert world.document["status"]["message"] == "The pod demo-worker-1 failed: paddle exited with 7."
    world.set(UP)
    world.step()
    assert world.phase == "Failed"  # for good


def test_pods_that_call_each_other_by_name() -> None:
    """000-26: intranet Service needs no address, so the ConfigMap comes at once; a lost pod is made again."""
    world = World(job(intranet="Service"))
    assert world.step() == [
        "create Secret demo-key-u1",
        "create ConfigMap demo",
        "create Service demo-worker-0",
        "create Service demo-worker-1",
        "create Pod demo-worker-0",
        "create Pod demo-worker-1",
    ]
    assert world.config_map is not None
    assert world.config_map["data"]["PADDLE_TRAINER_ENDPOINTS"] == "demo-worker-0:36000,demo-worker-1:36000"
    pod = world.pods["demo-worker-1"]["spec"]
    assert pod["containers"][0]["env"][0] == {"name": "POD_IP", "value": "demo-worker-1"}
    assert pod["restartPolicy"] == "OnFailure"
    service = world.services["demo-worker-1"]["spec"]
    assert service["selector"].items() <= world.pods["demo-worker-1"]["metadata"]["labels"].items()
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert [port["port"] for port in service["ports"]] == list(range(36000, 36020))
    world.set(UP)
    world.step()
    del world.pods["demo-worker-0"]
    assert world.step() == ["create Pod demo-worker-0"]


def test_pods_on_the_network_of_their_hosts() -> None:
    """000-26: intranet Host; the host port keeps two pods of a job off one node."""
    world = World(job(intranet="Host"))
    world.step()
    world.set({"phase": "Pending"})
    world.step()
    assert world.config_map is not None
    data = world.config_map["data"]
    port = int(data["PADDLE_PORT"])
    assert 36000 <= port <= 55980
    assert data["PADDLE_TRAINERS"] == "10.9.0.1,10.9.0.2"
    spec = world.pods["demo-worker-0"]["spec"]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert spec["containers"][0]["ports"] == [{"containerPort": port, "hostPort": port}]
    address = spec["containers"][0]["env"][0]
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.hostIP"}}


def test_a_pod_that_is_gone_ends_a_job_of_addresses() -> None:
    """A new pod would have another address than the one the others were told, and they would wait for ever."""
    world = World(job())
    world.step()
    world.set(UP)
    world.step()
    del world.pods["demo-worker-0"]
    assert world.step() == []
    assert world.phase == "Failed"
    assert "demo-worker-0 is gone" in world.document["status"]["message"]


def test_a_job_of_fixed_size_keeps_its_size() -> None:
    """An edit that the definition's rules did not stop (Kubernetes before 1.25) changes nothing, and says so."""
    world = World(job())
    world.step()
    world.set(UP)
    world.settle()
    world.document["spec"]["worker"]["replicas"] = 4
    assert world.step() == []
    assert world.phase == "Running"
    assert "worker.replicas is 4 and the job runs with 2" in world.document["status"]["message"]


def test_a_job_that_cannot_be_read_ends_with_the_reason() -> None:
    """000-26."""
    world = World(job(cleanPodPolicy="Sometimes"))
    assert world.step() == []
    assert world.phase == "Failed"
    assert "it takes Always, Never" in world.document["status"]["message"]
    running = World(job())
    running.step()
    running.set(UP)
    running.settle()
    running.document["spec"]["withGloo"] = 9
    assert running.step() == []
    assert running.phase == "Running"
    assert "withGloo is 9" in running.document["status"]["message"]
    running.set(DONE, "demo-worker-0")
    assert running.step() == []
    assert running.phase == "Running"
    running.set(DONE)
    assert running.step() == []
    assert running.phase == "Completed"
    assert running.document["status"]["completionTime"] == NOW


def test_a_running_job_that_was_edited_to_something_wrong_can_fail() -> None:
    world = World(job())
    world.step()
    world.set(UP)
    world.settle()
    world.document["spec"]["schedulingPolicy"] = {"minAvailable": 7}
    world.set({"phase": "Failed", "message": "gone"}, "demo-worker-1")
    world.step()
    assert world.phase == "Failed"
    assert world.document["status"]["message"].startswith("The pod demo-worker-1 failed: gone. spec.schedulingPolicy")


def test_volcano_gets_a_group_before_the_pods() -> None:
    """000-24: the volcano example."""
    policy = {"queue": "q", "priorityClass": "p", "minResources": {"cpu": 4}}
    world = World(job(servers=2, schedulingPolicy=policy))
    assert world.step()[1] == "create PodGroup demo"
    assert world.pod_group is not None
    assert world.pod_group["spec"] == {
        "minMember": 4, "queue": "q", "priorityClassName": "p", "minResources": {"cpu": 4},
    }  # fmt: skip
    for pod in world.pods.values():
        assert pod["spec"]["schedulerName"] == "volcano"
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "demo"


def test_everything_is_deleted_together_with_the_job() -> None:
    """000-29: by owner references; a job that is being deleted makes nothing more."""
    world = World(job(intranet="Service"))
    world.step()
    for made in [*world.pods.values(), *world.services.values(), world.config_map]:
        assert made is not None
        (owner,) = made["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("PaddleJob", "demo", "u1")
    world.document["metadata"]["deletionTimestamp"] = NOW
    world.pods.clear()
    assert world.step() == []
    assert world.phase == "Terminating"


def test_the_users_template_is_kept() -> None:
    template = copy.deepcopy(POD)
    template["metadata"] = {"labels": {"team": "a"}}
    template["spec"] |= {"restartPolicy": "OnFailure", "nodeSelector": {"gpu": "yes"}}
    world = World(job(worker={"replicas": 1, "template": template}))
    world.step()
    pod = world.pods["demo-worker-0"]
    assert pod["metadata"]["labels"]["team"] == "a"
    assert (pod["spec"]["restartPolicy"], pod["spec"]["nodeSelector"]) == ("OnFailure", {"gpu": "yes"})
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("demo-worker-0", "demo-worker-0")
    assert world.document["status"]["mode"] == "Single"


def test_each_pod_gets_the_key_of_its_job() -> None:
    """Parameter servers refuse to listen without one; a key that the user chose stands."""
    world = World(job(servers=1))
    world.settle()
    assert world.secrets == ["demo-key-u1"]
    for pod in world.pods.values():
        env = {item["name"]: item.get("valueFrom") for item in pod["spec"]["containers"][0]["env"]}
        assert env["FLEET_JOB_SECRET"] == {"secretKeyRef": {"name": "demo-key-u1", "key": "secret"}}
    own = {"name": "FLEET_JOB_SECRET", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "k"}}}
    containers = [{"name": "paddle", "image": "x", "env": [own]}]
    world = World(job(worker={"replicas": 1, "template": {"spec": {"containers": containers}}}))
    world.step()
    env = world.pods["demo-worker-0"]["spec"]["containers"][0]["env"]
    assert [item for item in env if item["name"] == "FLEET_JOB_SECRET"] == [own]
