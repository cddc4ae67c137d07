"""A node alone: generations and restarts."""

from __future__ import annotations

from pathlib import Path

from fleet.launch.membership.generation import Alone
from fleet.launch.plan.records import GroupResult, ProcessExit, ProcessSpec
from fleet.launch.restarts import RestartRule

SPEC = ProcessSpec(role="worker", index=0, local_index=0, command=("x",), environment={}, log_path=Path("log"))
FAILED = ProcessExit(spec=SPEC, pid=1, exit_code=7, signal_name=None, lifetime_s=1.0, ended_at=1.0)


def test_restarts_until_the_limit_then_the_code() -> None:
    alone = Alone(rule=RestartRule(limit=1), peers=(), node_rank=0)
    assert alone.join({"a": 1}).peers == ({"a": 1},)
    assert alone.settle(GroupResult(exit_code=7, first_failure=FAILED)).restart
    again = alone.join({"a": 2})
    assert (again.number, again.restarts, again.peers) == (1, 1, ({"a": 2},))
    outcome = alone.settle(GroupResult(exit_code=7, first_failure=FAILED))
    assert (outcome.exit_code, outcome.restart) == (7, False)


def test_a_signal_is_no_reason_to_restart() -> None:
    alone = Alone(rule=RestartRule(limit=5), peers=(), node_rank=0)
    alone.join({})
    assert not alone.settle(GroupResult(exit_code=143, stop_signal=15)).restart


def test_listed_peers_and_own_place() -> None:
    alone = Alone(rule=RestartRule(), peers=({"n": 0}, {"n": 1}), node_rank=1)
    generation = alone.join({"n": "own"})
    assert (generation.peers, generation.node_rank) == (({"n": 0}, {"n": 1}), 1)
    assert alone.news is None
