"""What follows from a failure: the table of the launcher's README."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.launch.plan.records import ProcessSpec
from fleet.launch.restarts import END, FAIL, GO_ON, IN_PLACE, REPLACE, SCHEDULER, TOO_LATE, Outcome, RestartRule
from tests.helpers.launching import read

SERVERS = ("--server_num=1", "--worker_num=2")
OLDER = ("--elastic_server=10.0.0.1:2379", "--np=2", "--job_id=J")


def spec(role: str, index: int, standbys: str = "") -> ProcessSpec:
    environment = {"FLEET_PS_STANDBY_ENDPOINTS": standbys} if standbys else {}
    return ProcessSpec(
        role=role, index=index, local_index=index, command=(), environment=environment, log_path=Path("log")
    )


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ((), RestartRule()),
        (("--max_restart=2",), RestartRule(limit=2)),
        ((*SERVERS, "--max_restart=2"), RestartRule(limit=2, one_by_one=True)),
        (OLDER, RestartRule(fault=SCHEDULER)),
        ((*OLDER, "--max_restart=2"), RestartRule(fault=IN_PLACE, limit=2)),
        ((*OLDER, "--elastic_level=0"), RestartRule(fault=END)),
    ],
)
def test_the_flags_choose_the_rule(flags: tuple[str, ...], rule: RestartRule) -> None:
    assert RestartRule.of(read(*flags)) == rule


@pytest.mark.parametrize(
    ("rule", "restarts", "outcome"),
    [
        (RestartRule(limit=1), 0, Outcome(7, restart=True)),
        (RestartRule(limit=1), 1, Outcome(7)),
        (RestartRule(limit=1, one_by_one=True), 0, Outcome(7)),
        (RestartRule(fault=SCHEDULER), 9, Outcome(101, restart=True)),
        (RestartRule(fault=END, limit=1), 0, Outcome(3)),
    ],
)
def test_the_failure_of_a_generation(rule: RestartRule, restarts: int, outcome: Outcome) -> None:
    assert rule.of_generation(7, restarts) == outcome
    assert rule.counts(outcome.restart) == (outcome.restart and rule.fault == IN_PLACE)


@pytest.mark.parametrize(
    ("failed", "replaced", "servers_have_ended", "step"),
    [
        (spec("worker", 0), 0, False, REPLACE),
        (spec("worker", 0), 0, True, TOO_LATE),
        (spec("worker", 0), 1, False, FAIL),
        (spec("server", 0), 0, False, REPLACE),
        (spec("server", 0), 1, False, FAIL),
        (spec("server", 0, "a:1,b:2"), 1, False, FAIL),
        (spec("server", 1, "a:1,b:2"), 1, False, GO_ON),
        (spec("server", 3, "a:1,b:2"), 1, False, FAIL),
    ],
)
def test_the_failure_of_a_process(failed: ProcessSpec, replaced: int, servers_have_ended: bool, step: str) -> None:
    rule = RestartRule(limit=1, one_by_one=True)
    running = [spec("server", 3)]
    found = rule.of_process(failed, replaced=replaced, running=running, servers_have_ended=servers_have_ended)
    assert found == step
