"""Every pair of switches either runs or is refused with a reason; nothing is dropped (A.5)."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from fleet.errors import StrategyConflictError, UnsupportedOptionError
from fleet.options import DistributedStrategy
from fleet.strategies import REGISTRY, plan
from fleet.strategies._declare.strategy_plan import chosen_strategies, ordered, problems, remarks

# The matrix of A.5 and of the white lists, by hand. Pairs that are absent may be on together.
CONFLICTS = {
    frozenset(pair)
    for pair in (
        ("dgc", "amp"),
        ("dgc", "fp16_allreduce"),
        ("dgc", "gradient_merge"),
        ("dgc", "lars"),
        ("dgc", "lamb"),
        ("dgc", "localsgd"),
        ("dgc", "adaptive_localsgd"),
        ("dgc", "sharding"),
        ("dgc", "pipeline"),
        ("dgc", "tensor_parallel"),
        ("lars", "lamb"),
        ("localsgd", "adaptive_localsgd"),
        ("localsgd", "gradient_merge"),
        ("localsgd", "lars"),
        ("localsgd", "lamb"),
        ("localsgd", "sharding"),
        ("localsgd", "pipeline"),
        ("localsgd", "tensor_parallel"),
        ("adaptive_localsgd", "gradient_merge"),
        ("adaptive_localsgd", "lars"),
        ("adaptive_localsgd", "lamb"),
        ("adaptive_localsgd", "sharding"),
        ("adaptive_localsgd", "pipeline"),
        ("adaptive_localsgd", "tensor_parallel"),
        ("pipeline", "gradient_merge"),
        ("pipeline", "asp"),
        ("pipeline", "qat"),
        ("tensor_parallel", "asp"),
        ("tensor_parallel", "qat"),
        ("sharding", "gradient_merge"),
        ("sharding", "fp16_allreduce"),
        ("sharding", "use_hierarchical_allreduce"),
        ("check_nan_inf", "to_static"),
        ("reproducible", "localsgd"),
        ("reproducible", "adaptive_localsgd"),
        ("reproducible", "dgc"),
        ("reproducible", "fp16_allreduce"),
        ("reproducible", "use_hierarchical_allreduce"),
        ("reproducible", "sync_batch_norm"),
        ("reproducible", "pipeline"),
        ("reproducible", "tensor_parallel"),
        ("reproducible", "to_static"),
    )
}
# Pairs that A.5 allows by name.
ALLOWED = [
    ("amp", "gradient_merge"),
    ("amp", "lars"),
    ("amp", "lamb"),
    ("amp", "recompute"),
    ("amp", "sharding"),
    ("amp", "pipeline"),
    ("amp", "localsgd"),
    ("amp", "asp"),
    ("asp", "lars"),
    ("asp", "lamb"),
    ("asp", "recompute"),
    ("asp", "gradient_merge"),
    ("fp16_allreduce", "lars"),
    ("fp16_allreduce", "lamb"),
    ("fp16_allreduce", "recompute"),
    ("fp16_allreduce", "localsgd"),
    ("fp16_allreduce", "gradient_merge"),
    ("fp16_allreduce", "adaptive_localsgd"),
    ("gradient_merge", "lars"),
    ("gradient_merge", "lamb"),
    ("gradient_merge", "recompute"),
    ("recompute", "lars"),
    ("recompute", "lamb"),
    ("recompute", "dgc"),
    ("recompute", "localsgd"),
    ("recompute", "pipeline"),
    ("recompute", "tensor_parallel"),
    ("recompute", "sharding"),
    ("sharding", "lars"),
    ("sharding", "lamb"),
    ("sharding", "asp"),
    ("sharding", "pipeline"),
]
# Pairs of which one switch honours the other in its place.
STANDS_IN = {frozenset(("reproducible", "gradient_merge")): {"gradient_merge"}}
SWITCHES = sorted(name for name, s in REGISTRY.items() if s.default is False)
PAIRS = list(itertools.combinations(SWITCHES, 2))


def strategy_with(*names: str) -> DistributedStrategy:
    """Returns a strategy with the switches on, and with what each of them needs to run."""
    strategy = DistributedStrategy()
    for name in names:
        setattr(strategy, name, True)
    strategy.recompute_configs = {"checkpoints": ["layer1"]}
    strategy.sharding_configs = {"sharding_degree": 2}
    strategy.gradient_merge_configs = {"k_steps": 2}
    return strategy


def test_the_table_names_switches() -> None:
    """The hand-written matrix does not name anything that does not exist."""
    named = {name for pair in CONFLICTS for name in pair} | {name for pair in ALLOWED for name in pair}
    assert named <= set(SWITCHES)
    assert not {frozenset(pair) for pair in ALLOWED} & CONFLICTS


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_pair(first: str, second: str) -> None:
    """A.5: the two run in one plan, or are refused with a reason; no third case."""
    strategy = strategy_with(first, second)
    found = problems(strategy, 2)
    conflicts = [error for error in found if isinstance(error, StrategyConflictError)]
    if frozenset((first, second)) in CONFLICTS:
        assert [{error.first, error.second} for error in conflicts] == [{first, second}]
        with pytest.raises(StrategyConflictError, match="cannot both be on: .{15}.*Turn one of them off"):
            plan(strategy, 2)
        return
    assert conflicts == []
    acting = {first, second} - STANDS_IN.get(frozenset((first, second)), set())
    refused = [name for name in (first, second) if REGISTRY[name].refused is not None]
    assert [str(error) for error in found if not isinstance(error, UnsupportedOptionError)] == []
    assert len(found) == len(refused)
    if refused:
        with pytest.raises(UnsupportedOptionError, match=f"'{REGISTRY[refused[0]].name}'|'{refused[-1]}'"):
            plan(strategy, 2)
    else:
        steps = [step.name for step in plan(strategy, 2).steps]
        assert acting <= set(steps)
    chosen = ordered(chosen_strategies(strategy, 2, collective=True))
    assert acting <= {step.name for step in chosen}  # neither was dropped on the way


def test_conflict_by_degree() -> None:
    """A.5: a degree above 1 counts like the switch."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"sharding_degree": 2}
    strategy.localsgd = True
    with pytest.raises(StrategyConflictError, match=r"'sharding' and 'localsgd'"):
        plan(strategy, 2)
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2}
    strategy.gradient_merge = True
    with pytest.raises(StrategyConflictError, match="accumulate_steps"):
        plan(strategy, 2)


def test_composition_order() -> None:
    """Closest to the user's objects first: modules, exchange, compiler; then update rule, then what gates it."""
    strategy = strategy_with(
        "recompute", "sync_batch_norm", "to_static", "fp16_allreduce", "lars", "asp", "amp", "gradient_merge"
    )
    steps = ordered(chosen_strategies(strategy, 2, collective=True))
    names = [step.name for step in steps]
    for inner, outer in itertools.pairwise(
        ["sync_batch_norm", "recompute", "data_parallel", "fp16_allreduce", "to_static", "lars", "asp", "amp",
         "gradient_merge"]
    ):  # fmt: skip
        assert names.index(inner) < names.index(outer), names
    for name in ("localsgd", "adaptive_localsgd"):
        local = ordered(chosen_strategies(strategy_with("amp", name), 2, collective=True))
        assert [step.name for step in local] == ["amp", name]  # and no data_parallel: gradients stay local
    sharded = ordered(chosen_strategies(strategy_with("recompute", "sharding", "lamb", "amp"), 2, collective=True))
    assert [step.name for step in sharded] == ["recompute", "data_parallel", "sharding", "lamb", "amp"]
    strategy = strategy_with("sharding", "amp")
    strategy.sharding_configs = {"stage": 2}  # which reduces gradients to their owners by itself
    assert [s.name for s in ordered(chosen_strategies(strategy, 2, collective=True))] == ["sharding", "amp"]


def test_plan_order_does_not_depend_on_the_hash_seed() -> None:
    """Every rank must compute the same order, whatever PYTHONHASHSEED is."""
    code = (
        "from tests.strategies.test_pairs import *\n"
        "s = strategy_with('recompute', 'sync_batch_norm', 'fp16_allreduce', 'lars', 'asp', 'amp', 'gradient_merge',"
        " 'to_static', 'qat', 'cudnn_exhaustive_search', 'use_hierarchical_allreduce')\n"
        "steps = ordered(chosen_strategies(s, 2, collective=True))\n"
        "print([x.name for x in steps], [str(e) for e in problems(s, 2)], remarks(s, steps, 2))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("0", "1")
    ]
    printed = [process.communicate(timeout=150)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 2
    assert len(set(printed)) == 1
    assert "'recompute', 'data_parallel'" in printed[0]


# ---- parameter-server jobs ------------------------------------------------------------------------------------------


def test_a_sync_untouched_is_nothing_in_a_collective_job() -> None:
    """A0.9, G8: the default a_sync=True turns nothing on and says nothing in a collective job."""
    made = plan(DistributedStrategy(), 2)
    assert [step.name for step in made.steps] == ["data_parallel"]
    assert made.notes == ()
    assert plan(DistributedStrategy(), 1).steps == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("a_sync", True), ("a_sync", False), ("a_sync_configs", {"k_steps": 3}), ("adam_d2sum", True),
     ("sparse_table_configs", {"emb": {}})],
)  # fmt: skip
def test_server_options_in_a_collective_job_are_remarked(name: str, value: object) -> None:
    """A.5: PS options in a collective job change nothing, and the plan says so."""
    strategy = DistributedStrategy()
    setattr(strategy, name, value)
    notes = plan(strategy, 2).notes
    assert any(note.startswith(f"{name} was set") and "collective job" in note for note in notes), notes


@pytest.mark.parametrize("name", [n for n in SWITCHES if not REGISTRY[n].in_ps_job])
def test_collective_switches_in_a_server_job_are_remarked(name: str) -> None:
    """A.5: collective switches change nothing in a PS job, and the plan says so instead of dropping them silently."""
    strategy = DistributedStrategy()
    setattr(strategy, name, True)
    steps = chosen_strategies(strategy, 2, collective=False)
    assert [step.name for step in steps if step.in_ps_job] == [step.name for step in steps] == ["a_sync"]
    notes = remarks(strategy, steps, 2, collective=False)
    assert any(note.startswith(f"{name} was set") and "parameter-server job" in note for note in notes), notes


def test_the_mesh_in_a_server_job_is_remarked() -> None:
    """A.5: degrees lay out collective workers; a PS job says that it has no mesh, and does not check the product."""
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 7}
    steps = chosen_strategies(strategy, 2, collective=False)
    assert any(note.startswith("hybrid_configs was set") for note in remarks(strategy, steps, 2, collective=False))
    assert not any("dp_degree" in str(error) for error in problems(strategy, 2, collective=False))


@pytest.mark.parametrize("name", ["amp", "recompute", "asp"])
def test_local_switches_work_in_a_server_job(name: str) -> None:
    """A.5: the white list of the parameter server."""
    chosen = chosen_strategies(strategy_with(name), 2, collective=False)
    assert {step.name for step in chosen} == {name, "a_sync"}


def test_server_job_never_adds_data_parallel() -> None:
    """A PS job exchanges through the servers only."""
    assert [s.name for s in chosen_strategies(DistributedStrategy(), 4, collective=False)] == ["a_sync"]


def test_server_job_left_open_is_async_with_a_note() -> None:
    """A0.9, G8: untouched means asynchronous, with a note."""
    strategy = DistributedStrategy()
    steps = chosen_strategies(strategy, 2, collective=False)
    assert any("trains asynchronously" in note for note in remarks(strategy, steps, 2, collective=False))
    strategy.a_sync = True
    assert remarks(strategy, steps, 2, collective=False) == []
