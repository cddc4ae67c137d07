"""Ports, variables and the state of a pod, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet.k8s.contract import first_port, plan_variables
from fleet.k8s.objects import plan_config_map
from fleet.k8s.paddle_job import read_job
from fleet.k8s.reconcile import pod_state
from tests.helpers.kubernetes import job_document

UP = {"phase": "Running", "containerStatuses": [{"name": "paddle", "ready": True}]}
DOWN, DONE = {"phase": "Failed"}, {"phase": "Succeeded"}
STARTING = {"phase": "Running", "containerStatuses": [{"name": "paddle", "ready": False}]}


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (UP, "running"),
        (STARTING, "starting"),
        ({"phase": "Running"}, "starting"),
        ({**UP, "initContainerStatuses": [{"ready": False}]}, "starting"),
        (DOWN, "failed"),
        (DONE, "succeeded"),
        ({}, "pending"),
        ({"phase": "Unknown"}, "unknown"),
    ],
)
def test_the_state_of_a_pod(status: dict[str, Any], state: str) -> None:
    """E.2: a pod that Kubernetes calls Running is starting until its containers run."""
    assert pod_state({"status": status}) == state


def test_ports_of_jobs_that_share_addresses_differ() -> None:
    ports = {first_port(replace(read_job(job_document(intranet="Host")), uid=f"u{i}")) for i in range(40)}
    assert len(ports) > 30
    assert all((port - 36000) % 20 == 0 for port in ports)
    assert first_port(read_job(job_document())) == 36000


def test_addresses_of_the_newer_protocol_stand_in_brackets() -> None:
    hosts = {"worker": ["fd00::1"]}
    one = replace(read_job(job_document(1)), uid="")
    assert plan_variables(one, hosts)["PADDLE_TRAINER_ENDPOINTS"] == "[fd00::1]:36000"
    assert plan_config_map(one, {})["metadata"].get("ownerReferences") is None
