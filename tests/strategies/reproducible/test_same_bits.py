"""Issue 44: weights, optimizer state and losses have the same bits on any number of workers, whatever is composed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fleet.job.logical_workers import hosted_ranks
from tests.helpers.reproducible_training import (
    CLIPS,
    LOOPS,
    MODELS,
    ROUNDS,
    RULES,
    SCALED,
    SCHEDULES,
    Case,
    differing_bits,
    plain_torch,
    train_all,
)
from tests.helpers.workers import run_workers

SEED = 0
MANY = (1, 2, 3, 4, 5, 8)
# Options, of which a draw takes some; each with its values.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "amp": [
        {"amp_configs": {"dtype": "bfloat16"}},
        {"amp_configs": {"dtype": "float16", "init_loss_scaling": 1024.0}},
        {"amp_configs": {"dtype": "float16", "init_loss_scaling": 2.0**40, "decr_every_n_nan_or_inf": 1}},
        {"amp_configs": {"use_pure_bf16": True}},
        {"amp_configs": {"use_pure_fp16": True, "init_loss_scaling": 1024.0}},
    ],
    "recompute": [{"recompute_configs": {"checkpoints": ["1"]}}],
    "sharding": [{"sharding_configs": {"stage": 1, "sharding_degree": -1}}],
    "lars": [{"lars_configs": {"lars_coeff": 0.01}}],
    "lamb": [{}],
    "asp": [{}],
    "gradient_merge": [
        {"gradient_merge_configs": {"k_steps": 2}},
        {"gradient_merge_configs": {"k_steps": 3, "avg": False}},
    ],
    "check_nan_inf": [{}],
}
# Settings without a switch.
SETTINGS: list[dict[str, Any]] = [
    {"gradient_scale_configs": {"scale_strategy": "sum"}},
    {"fuse_all_reduce_ops": False},
    {"last_comm_group_size_MB": 0.001},
    {"build_strategy": {"fuse_all_optimizer_ops": True}},
]
# Without draws: what torch alone can repeat.
PLAIN = [
    Case(model="conv", rule="momentum", draws=False, clip="torch", schedule="cosine"),
    Case(model="attention", rule="adam", draws=False, logical=5),
    Case(model="branches", rule="adamw", draws=False, logical=8, schedule="step"),
    Case(model="recurrent", rule="sgd", draws=False, logical=3, clip="torch"),
]


def draw(number: int, seed: int = SEED) -> tuple[Case, tuple[int, int]]:
    """Returns the case of that number, and two numbers of workers for it."""
    dice = random.Random(f"{seed}/{number}")
    names = dice.sample([*OPTIONS], dice.choice((0, 1, 2, 3)))
    if {"lars", "lamb"} <= {*names}:
        names.remove("lars")
    rule = "momentum" if "lars" in names else "adam" if "lamb" in names else dice.choice([*RULES])
    model = dice.choice(["mlp", "attention"] if "asp" in names else [*MODELS])
    options: dict[str, Any] = {}
    for name in names:
        options |= {name: True, **dice.choice(OPTIONS[name])}
    if dice.random() < 0.3:
        options |= dice.choice(SETTINGS)
    logical = dice.randint(2, 8)
    case = Case(
        number=number,
        model=model,
        rule=rule,
        loop=dice.choice([name for name in LOOPS if name != SCALED or "amp" in names]),
        logical=logical,
        options=options,
        clip=dice.choice(["", "", "torch", "torch_value", "by_hand", *CLIPS]),
        schedule=dice.choice(["", *SCHEDULES]),
        averages=dice.random() < 0.3,
        counts=dice.random() < 0.3,
    )
    workers = dice.sample(range(2, logical + 1), 2) if logical > 2 else [2, 2]
    return case, (workers[0], workers[1])


def fault_of(case: Case, alone: dict[str, Any], together: Sequence[dict[str, Any]]) -> str:
    """Returns what is wrong with the results of all workers beside that of one process, or nothing."""
    reasons = {found.get("refused", "") for found in (alone, *together)}
    if reasons != {""}:
        return "" if "" not in reasons else f"refused on some numbers of workers alone: {reasons}"
    num = len(together)
    for rank, found in enumerate(together):
        if differing := differing_bits(alone["bits"], found["bits"]):
            return f"worker {rank} of {num}: {sum(differing.values())} bits differ: {dict([*differing.items()][:8])}"
        passes = len(hosted_ranks(case.logical, num, rank)) * ROUNDS * case.epochs
        if found["forwards"] != passes:
            return f"worker {rank} of {num} ran {found['forwards']} forwards of its {passes}"
    return ""


def check(drawn: Sequence[tuple[Case, Sequence[int]]]) -> Counter[str]:
    """Runs each case in one process and on its numbers of workers; returns the outcomes."""
    cases = [case for case, _ in drawn]
    alone = dict(zip(cases, run_workers(train_all, 1, cases, backend=None, timeout_s=1200)[0], strict=True))
    faults = []
    for num in sorted({num for _, numbers in drawn for num in numbers} - {1}):
        some = [case for case, numbers in drawn if num in numbers]
        results = run_workers(train_all, num, some, backend=None, timeout_s=1200)
        for place, case in enumerate(some):
            if fault := fault_of(case, alone[case], [found[place] for found in results]):
                faults.append(f"{case}\n  {fault}")
    if faults:
        pytest.fail("\n".join(faults), pytrace=False)
    return Counter(found.get("refused", "trained") for found in alone.values())


def test_dropout_and_buffers_on_one_two_and_three_workers() -> None:
    case = Case(model="conv", rule="adamw", logical=4, clip="torch", schedule="cosine", averages=True)
    narrow = {"amp": True, "amp_configs": {"dtype": "float16"}}
    scaled = Case(model="mlp", loop=SCALED, clip="torch", options=narrow)
    assert check([(one, (1, 2, 3)) for one in (case, Case(model="spectral"), scaled)]) == {"trained": 3}


@pytest.mark.slow
def test_every_number_of_workers() -> None:
    """Weights, optimizer state, averages, losses and what is drawn next; the forwards are shared."""
    case = Case(model="conv", rule="momentum", logical=8, epochs=3, clip="torch", schedule="step", averages=True)
    text = Case(model="attention", rule="adamw", logical=8, epochs=2, counts=True)
    assert check([(case, MANY), (text, MANY)]) == {"trained": 2}


@pytest.mark.slow
def test_drawn_compositions() -> None:
    outcomes = check([draw(number) for number in range(16)])
    assert outcomes["trained"] > 12, outcomes


@pytest.mark.long
def test_two_hundred_drawn_compositions() -> None:
    outcomes = check([draw(number) for number in range(16, 216)])
    assert outcomes["trained"] > 170, outcomes


@pytest.mark.slow
def test_the_same_updates_in_plain_torch() -> None:
    """Within rounding: torch adds the gradients of the batches in a row, and not in a tree."""
    found = run_workers(train_all, 3, PLAIN, backend=None)[0]
    for case, result in zip(PLAIN, found, strict=True):
        for name, expected in plain_torch(case).items():
            got = result["bits"][f"/weights/{name}"].view(expected.dtype).view(expected.shape)
            assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5, (case, name)


def test_a_draw_is_a_function_of_its_number_and_the_seed() -> None:
    assert [draw(number) for number in range(50)] == [draw(number) for number in range(50)]


def test_the_draws_reach_everything() -> None:
    drawn = [draw(number) for number in range(16, 216)]
    cases = [case for case, _ in drawn]
    for name, values in (("model", MODELS), ("rule", RULES), ("loop", LOOPS)):
        assert {getattr(case, name) for case in cases} == {*values}
    assert {case.clip for case in cases} >= {"", "torch", "torch_value", "by_hand", *CLIPS}
    assert {case.schedule for case in cases} == {"", *SCHEDULES}
    assert {name for case in cases for name in case.options} >= {*OPTIONS}
    assert {num for _, numbers in drawn for num in numbers} == {2, 3, 4, 5, 6, 7, 8}


def test_what_is_wrong_is_found() -> None:
    """A bit that differs, a forward too many, and a refusal on one number of workers alone."""
    case = Case(logical=2)
    right = {"bits": {"/weights/0": torch.tensor([1, 2], dtype=torch.uint8)}, "forwards": ROUNDS}
    wrong = {**right, "bits": {"/weights/0": torch.tensor([1, 7], dtype=torch.uint8)}}
    assert fault_of(case, right, [right, right]) == ""
    assert "worker 1 of 2: 2 bits differ: {'/weights/0': 2}" in fault_of(case, right, [right, wrong])
    assert "ran 12 forwards of its 6" in fault_of(case, right, [{**right, "forwards": 12}, right])
    assert "refused on some" in fault_of(case, right, [{"refused": "why"}, {"refused": "why"}])
    assert fault_of(case, {"refused": "why"}, [{"refused": "why"}, {"refused": "why"}]) == ""
    assert differing_bits(right["bits"], {}) == {"/weights/0": -1}
