"""reproducible: what it refuses, what it says, and a job from its options to its end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, OptionWarning, StrategyConflictError
from fleet.job.running import running_job
from fleet.options import DistributedStrategy
from fleet.strategies import REGISTRY
from fleet.strategies._declare.strategy_plan import plan
from fleet.strategies.reproducible import Reproducible
from tests.helpers.workers import run_workers
from tests.strategies.reproducible.turns import network, rows, sgd, square, start, train, turns, weights, wrapped

CONFLICTS = {
    "localsgd": "its workers train on their own",
    "adaptive_localsgd": "its workers train on their own",
    "dgc": "made in the tree of 'reproducible'",
    "fp16_allreduce": "made in the tree of 'reproducible'",
    "use_hierarchical_allreduce": "made in the tree of 'reproducible'",
    "sync_batch_norm": "averages statistics over processes",
    "pipeline": "micro-batches of a pipeline add up inside train_batch",
    "tensor_parallel": "its workers hold parts of layers",
    "to_static": "compiled kernels are chosen anew",
}


def options(**changes: Any) -> DistributedStrategy:
    """Returns options with reproducible on."""
    strategy = DistributedStrategy()
    strategy.update({"reproducible": True, **changes})
    return strategy


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", CONFLICTS)
def test_options_of_which_the_result_depends_on_the_workers(other: str) -> None:
    with pytest.raises(StrategyConflictError, match=rf"cannot both be on: .*{CONFLICTS[other]}.*Turn one of them off"):
        plan(options(**{other: True}), 1)


def test_every_conflict_is_tested() -> None:
    assert {*REGISTRY["reproducible"].conflicts} == {*CONFLICTS}


def test_more_workers_than_logical_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['logical_workers'\] is 2, and there are 3 workers.*Start fewer workers"):
        plan(options(reproducible_configs={"logical_workers": 2}), 3)
    plan(options(reproducible_configs={"logical_workers": 3}), 3)


@pytest.mark.parametrize("axis", ["sep", "cp", "ep"])
def test_workers_that_hold_parts_of_a_sequence_are_refused(axis: str) -> None:
    rest = {"sharding_degree": 4, "dp_degree": 1, "moe_sharding_degree": 2} if axis == "ep" else {}
    with pytest.raises(ConfigError, match=f"the {axis} degree is 2: these workers hold parts.*Set {axis}_degree to 1"):
        plan(options(hybrid_configs={f"{axis}_degree": 2, **rest}), 4)


@pytest.mark.parametrize("axis", ["mp", "pp"])
def test_workers_that_hold_parts_of_a_model_are_refused(axis: str) -> None:
    """The degree turns an option on that has a conflict of its own."""
    with pytest.raises(StrategyConflictError, match="'reproducible'"):
        plan(options(hybrid_configs={f"{axis}_degree": 2}), 4)


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_that_exchange_on_their_own_are_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match=rf"\['stage'\] is {stage}: stages 2 and 3 reduce each gradient.*Set it to 1"):
        plan(options(sharding=True, sharding_configs={"stage": stage}), 2)


def test_split_parameters_are_refused() -> None:
    changes = {"sharding_degree": 2, "sharding_configs": {"split_param": True}}
    with pytest.raises(ConfigError, match=r"\['stage'\] is 2"):
        plan(options(hybrid_configs=changes), 2)


def test_batches_merged_by_sharding_are_refused() -> None:
    place = r"\['k_steps'\] in its place"
    with pytest.raises(ConfigError, match=rf"\['gradient_merge_acc_step'\] is 2. Set it to 1.*{place}"):
        plan(options(sharding=True, sharding_configs={"stage": 1, "gradient_merge_acc_step": 2}), 2)
    changes = {"sharding_degree": 2, "sharding_configs": {"accumulate_steps": 3}}
    with pytest.raises(ConfigError, match=rf"\['accumulate_steps'\] is 3. Set it to 1.*{place}"):
        plan(options(hybrid_configs=changes), 2)


def test_stage_1_is_planned() -> None:
    found = plan(options(sharding=True, sharding_configs={"stage": 1}), 2)
    assert {"reproducible", "sharding"} <= {step.name for step in found.steps}


def test_lbfgs_is_refused() -> None:
    start(2)
    net = network()
    with pytest.raises(ConfigError, match="LBFGS runs its closure as often as it likes"):
        fleet.distributed_optimizer(torch.optim.LBFGS(net.parameters()))


def scaled_turn(told: bool, **options: Any) -> None:
    """Trains a turn with a GradScaler."""
    start(2, **options)
    model, optimizer = wrapped(network())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    if told:
        fleet.distributed_scaler(scaler)
    for rank in fleet.elastic.logical_ranks():
        scaler.scale(square(model, 0, rank)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("told", [True, False])
def test_a_grad_scaler_without_amp_is_refused(told: bool) -> None:
    with pytest.raises(ConfigError, match=r"loss with reproducible on and amp off.*Set strategy.amp = True"):
        scaled_turn(told)


def test_a_grad_scaler_is_told_of_before_the_loop() -> None:
    scaled_turn(True, amp=True)
    with pytest.raises(ConfigError, match=r"was not told of.*all batches of an update have one scale: write scaler ="):
        scaled_turn(False, amp=True)


@pytest.mark.parametrize(("key", "value"), [("logical_workers", 0), ("threads", 0)])
def test_numbers_have_bounds(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=key):
        options(reproducible_configs={key: value})


# ---- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num", "world_size", "merged", "words"),
    [
        (8, 3, 1, "8 logical workers on 3 processes: 3, 3, 2"),
        (8, 4, 1, "8 logical workers on 4 processes: 2, 2, 2, 2"),
        (8, 4, 5, "after 5 rounds of them"),
    ],
)
def test_the_plan_names_the_hosts(num: int, world_size: int, merged: int, words: str) -> None:
    strategy = options(
        reproducible_configs={"logical_workers": num},
        gradient_merge=merged > 1,
        gradient_merge_configs={"k_steps": merged},
    )
    assert words in " ".join(Reproducible.effects(strategy, world_size))
    assert words in fleet.fleet.explain(strategy, world_size)


def test_too_few_logical_workers_have_no_numbers_to_say() -> None:
    strategy = options(reproducible_configs={"logical_workers": 2})
    assert Reproducible.effects(strategy, 3) == (Reproducible.model_effect, Reproducible.optimizer_effect)


# ---- a job ----------------------------------------------------------------------------------------------------------


def test_the_job_has_logical_workers_until_its_end() -> None:
    logical = start(3)
    job = running_job()
    assert job is not None
    assert (logical.num, [*logical.ranks], logical.rounds_per_update) == (3, [0, 1, 2], 1)
    fleet.fleet._instance()._close()
    assert job.logical is None


def test_rounds_are_those_of_gradient_merge() -> None:
    assert start(3, gradient_merge=True, gradient_merge_configs={"k_steps": 4}).rounds_per_update == 4
    assert start(3, gradient_merge_configs={"k_steps": 4}).rounds_per_update == 1


def test_rounds_of_an_evaluation_belong_to_no_update() -> None:
    """Otherwise schedulers, checkpoints and losses would follow other rounds than the optimizer."""
    logical = start(2, gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    model, optimizer = wrapped(network())
    amid: list[bool] = []
    for update in range(2):
        for _ in range(2):
            train(model, optimizer, [update], after=lambda: amid.append(logical.is_amid_update))
        assert logical.is_at_update
        for rank in fleet.elastic.logical_ranks():
            with torch.no_grad():
                model(rows(update, rank))
    assert amid == 2 * [True, True, True, False]


def unequal(rank: int, world_size: int) -> list[Any]:
    """Starts from other parameters, buffers and a seed on each worker; adds a parameter later."""
    torch.manual_seed(rank)
    start(2)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net[1].running_mean.fill_(rank)  # type: ignore[union-attr, operator]
    model, optimizer = wrapped(net)
    begun = weights(net)
    for update in range(2):
        for logical_rank in fleet.elastic.logical_ranks():
            (model(rows(update, logical_rank)) * torch.rand(())).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [begun, weights(net), float(torch.rand(()))]


def test_all_workers_start_from_worker_0() -> None:
    first, second = run_workers(unequal, 2, backend=None)
    (alone,) = run_workers(unequal, 1, backend=None)
    for found in (first, second):
        for place in (0, 1):
            assert all(torch.equal(value, alone[place][name]) for name, value in found[place].items())
        assert found[2] == alone[2]


def other_kernels(rank: int, world_size: int) -> str:
    """Starts on workers of two kinds; returns the warning."""
    start(2)
    turns().kernels["processor"] = f"kind {rank}"
    with pytest.warns(OptionWarning) as said:
        fleet.distributed_model(network())
    return str(said[0].message)


def test_workers_of_several_kinds_are_said() -> None:
    for said in run_workers(other_kernels, 2, backend=None):
        assert "the bits hold for workers of one kind" in said
        assert "processor 'kind 0' on worker 0 and 'kind 1' on worker 1" in said


def stage_1(rank: int, world_size: int, rounds: int) -> Any:
    """Trains in stage 1 with clipping."""
    stage = {"stage": 1, "sharding_degree": world_size}
    merged = {"gradient_merge": rounds > 1, "gradient_merge_configs": {"k_steps": rounds}}
    start(4, sharding=True, sharding_configs=stage, **merged)
    net = network()
    model, optimizer = wrapped(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    for update in range(3 * rounds):
        for logical_rank in fleet.elastic.logical_ranks():
            model(rows(update, logical_rank)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


@pytest.mark.parametrize("rounds", [1, 2])
def test_stage_1_has_the_same_bits(rounds: int) -> None:
    (alone,) = run_workers(stage_1, 1, rounds, backend=None)
    for found in run_workers(stage_1, 2, rounds, backend=None):
        assert all(torch.equal(value, alone[name]) for name, value in found.items())


def test_an_average_over_a_whole_update_needs_no_model() -> None:
    """A net that distributed_model was not given is trained too."""
    start(2)
    net = network()
    optimizer = fleet.distributed_optimizer(sgd(net))
    before = weights(net)
    fleet.distributed_model(network())
    train(net, optimizer, range(1))
    assert any(not torch.equal(value, before[name]) for name, value in weights(net).items())
