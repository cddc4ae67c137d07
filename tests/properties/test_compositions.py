"""Issue 9: in every loop that people write, a strategy does what plain torch and its formula give, or is refused.

A failure prints the draw, a smaller one, and a script that shows it. ``python -m tests.properties.compositions --only
NUMBER`` runs one draw again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.ready_python import run_python
from tests.properties.compositions import Report, pools, run, run_one
from tests.properties.draws import (
    NAMES,
    PLAIN_LOOPS,
    PLAIN_MODELS,
    PLANNED_WITH,
    PLANS,
    TRYING_LOOPS,
    TRYING_MODELS,
    WHOLE_GRADIENTS,
    Composition,
    difference,
    draw,
    expectation,
    initial,
    invariant,
    judge,
    planned,
)
from tests.properties.loops import LOOPS
from tests.properties.models import MODELS
from tests.properties.oracle import Oracle
from tests.properties.script import script_of

QUICK, MORE, ALL = 80, 200, 5200
PLANNED, MORE_PLANNED, ALL_PLANNED = 10, 80, 400
INVARIANT, MORE_INVARIANT, ALL_INVARIANT = 24, 80, 5080
PLAIN = Composition(-1, "Mlp", "zero_first", "sgd", (), {}, 1, 3)
MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}

NARROW = {"asp": True, "fp16_allreduce": True, "fp16_allreduce_configs": {"dtype": "bfloat16"}}


def check(report: Report) -> None:
    """Fails with the script of the first fault."""
    if report.faults:
        pytest.fail(f"{report}\n\n{report.script(0)}", pytrace=False)
    trained = report.outcomes["trained"]
    assert trained > report.outcomes["refused"], "most compositions work"


def test_eighty_compositions() -> None:
    check(run(range(QUICK), seed=0, most_faults=3))


@pytest.mark.slow
def test_two_hundred_compositions() -> None:
    check(run(range(QUICK, MORE), seed=0))


@pytest.mark.long
def test_five_thousand_compositions() -> None:
    check(run(range(MORE, ALL), seed=0))


def test_compositions_divided_by_a_plan() -> None:
    check(run(range(PLANNED), seed=0, drawn=planned, most_faults=3))


@pytest.mark.slow
def test_more_compositions_divided_by_a_plan() -> None:
    check(run(range(PLANNED, MORE_PLANNED), seed=0, drawn=planned))


@pytest.mark.long
def test_all_compositions_divided_by_a_plan() -> None:
    check(run(range(MORE_PLANNED, ALL_PLANNED), seed=0, drawn=planned))


def test_compositions_in_which_an_invariant_is_at_stake() -> None:
    check(run(range(INVARIANT), seed=0, drawn=invariant, most_faults=3))


@pytest.mark.slow
def test_more_compositions_in_which_an_invariant_is_at_stake() -> None:
    check(run(range(INVARIANT, MORE_INVARIANT), seed=0, drawn=invariant))


@pytest.mark.long
def test_all_compositions_in_which_an_invariant_is_at_stake() -> None:
    check(run(range(MORE_INVARIANT, ALL_INVARIANT), seed=0, drawn=invariant))


FOUND_ONCE = (1324, 711, 1465, 560, 717, 2223, 3177)
"""Draws of invariants that found a fault: plain modules under gradient merge, a head outside of forward whose sum was
divided too late, an oracle that dropped gradients of zeros, momentum that one kernel missed, and a conversion inside of
a window of batches."""


def test_draws_that_found_a_fault_once() -> None:
    check(run(FOUND_ONCE, seed=0, drawn=invariant))


def test_the_plans_reach_everything() -> None:
    made = [planned(i, 0) for i in range(ALL_PLANNED)]
    assert {one.model for one in made} == {*PLANS}
    assert {one.loop for one in made} == {*PLAIN_LOOPS} - {*WHOLE_GRADIENTS}
    assert {name for one in made for name in one.names} == {*PLANNED_WITH}
    assert {(one.workers, one.copies) for one in made} == {(2, 1), (4, 2)}


@pytest.mark.parametrize("drawn", [draw, invariant, planned])
def test_a_draw_is_a_function_of_its_number_and_the_seed(drawn: Callable[[int, int], Composition]) -> None:
    assert [drawn(i, 3) for i in range(50)] == [drawn(i, 3) for i in range(50)]
    assert draw(1000, 0) != replace(draw(1000, 1))


def test_the_draws_reach_everything() -> None:
    made = [draw(i, 0) for i in range(MORE)]
    assert {one.model for one in made} == {*PLAIN_MODELS}
    assert {one.loop for one in made[:QUICK]} == {*PLAIN_LOOPS}
    assert {name for one in made[:QUICK] for name in one.names} == set(NAMES)
    tried = [invariant(i, 0) for i in range(MORE_INVARIANT)]
    assert {one.model for one in tried} >= {*TRYING_MODELS}
    assert {one.loop for one in tried} >= {*TRYING_LOOPS}


def test_what_is_wrong_is_found() -> None:
    """Workers that merge two batches are held against plain torch that does not, and the other way round."""
    merged = replace(PLAIN, options=MERGED, steps=4)
    with pools() as at:
        assert run_one(PLAIN, at).fault == ""
        assert run_one(merged, at).fault == ""
        at[1].send(merged.sent())
        results = at[1].results()
    assert "is off by" in judge(merged, results, expectation(replace(merged, options={}))).fault
    assert judge(merged, [{"outcome": "refused: X", "moved": True}], []).fault.startswith("refused after a step")
    assert "hangs" in judge(merged, [{"outcome": "hangs", "moved": True}], []).fault


def test_a_pool_that_hangs_is_started_again() -> None:
    with pools() as at:
        at[1].start()
        at[1].limit_s = 0.0
        assert "hangs" in run_one(PLAIN, at).fault
        assert run_one(PLAIN, at).fault == ""


@pytest.mark.parametrize("name", LOOPS)
def test_the_script_of_a_fault_stands_alone(name: str) -> None:
    made = replace(PLAIN, loop=name, model="Penalty" if name != "closure" else "Listed")
    compile(script_of(made, "", expectation(made)), name, "exec")


def test_the_script_of_a_fault_runs(tmp_path: Path) -> None:
    script = tmp_path / "shown.py"
    script.write_text(script_of(PLAIN, "nothing is wrong", expectation(PLAIN)))
    done = run_python(script, timeout_s=100)
    shown = done.stdout
    assert done.returncode == 0, done.stderr
    assert "rank 0 0.0.weight: off by 0:" in shown or "off by 1e-" in shown


def test_the_plain_oracle_is_plain_torch() -> None:
    """The oracle itself, against a loop of five lines."""
    from tests.properties.models import batch

    torch.manual_seed(0)
    net = MODELS["Mlp"]().nets()[0]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for number in range(3):
        data = [batch(number, rank) for rank in range(2)]
        x, y = (torch.cat(column) for column in zip(*data, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    for of_worker in expectation(replace(PLAIN, workers=2)):
        for name, value in net.state_dict().items():
            torch.testing.assert_close(of_worker[f"0.{name}"], value, atol=1e-6, rtol=1e-5)


class Rotated(Oracle):
    """Adds the workers up in another order of the ring."""

    first = 1

    def total(self, parts: list[torch.Tensor], summed: bool) -> torch.Tensor:
        return super().total([*parts[self.first :], *parts[: self.first]], summed)


@pytest.mark.parametrize("rule", ["sgd", "momentum"])
def test_orders_of_a_narrow_sum_are_within_their_bound(rule: str) -> None:
    """Every order of the ring is right; the steps of this composition cancel in part, so two orders are 1 % apart."""
    made = Composition(67, "Attention", "accumulate_no_sync", rule, ("asp", "fp16_allreduce"), NARROW, 4, 3)
    expected, start = expectation(made), initial(made)
    shares = []
    for first in (1, 2, 3):
        other = Rotated(made.model, made.loop, made.rule, made.options, made.workers, made.steps)
        other.first = first
        found = other.train()
        assert difference(made, found, expected) == ""
        moved = [float((expected[0][name] - start[name]).abs().max()) for name in start]
        apart = [float((found[0][name] - expected[0][name]).abs().max()) for name in start]
        shares += [off / move for off, move in zip(apart, moved, strict=True) if move > 0.05 * max(moved)]
    assert max(shares) > 0.01


def test_workers_add_up_in_an_order_of_the_ring() -> None:
    made = Composition(67, "Attention", "accumulate_no_sync", "sgd", ("asp", "fp16_allreduce"), NARROW, 4, 3)
    expected = expectation(made)
    with pools() as at:
        at[4].send(made.sent())
        found = [result["values"] for result in at[4].results()]
    assert difference(made, found, expected) == ""
    summed = replace(made, options={**NARROW, "gradient_scale_configs": {"scale_strategy": "sum"}})
    assert "is off by" in difference(made, found, expectation(summed))
    assert "is off by" in difference(made, [{n: v * torch.nan for n, v in of.items()} for of in found], expected)
