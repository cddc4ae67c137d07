"""Which models a script divides by hand, from records made by hand."""

from pathlib import Path
from typing import Any

import pytest

from fleet.verify.hand_division import HandDivision, hand_division, mark_parts
from fleet.verify.incomparable_runs import NotComparable
from fleet.verify.number_findings import Tolerance, compare_numbers
from fleet.verify.paired_runs import Run
from fleet.verify.worker_findings import worker_findings


def digest(*values: float) -> dict[str, Any]:
    return {"p": sum(values), "s": sum(value**2 for value in values), "n": len(values), "part": ""}


def run_of(*workers: dict[str, dict[str, Any]], rows: tuple[str, ...] = ()) -> Run:
    """Returns a run whose workers begin with these tensors, and read a row each."""
    records: list[list[dict[str, Any]]] = [
        [{"kind": "start", "model": "", "values": values, "ties": [], "unfilled": []}] for values in workers
    ]
    for record, row in zip(records, rows, strict=False):
        record.append({"kind": "batch", "rows": [row]})
    return Run(folder=Path("x"), records=records)


def test_parts_are_smaller_than_the_whole_and_make_it_up() -> None:
    one = run_of({"w": digest(1, 2, 3), "b": digest(1)})
    padded = [{"w": digest(1, 2), "b": digest(1)}, {"w": digest(3, 0), "b": digest(1)}]
    for rows, is_one_copy in ((("r", "r"), True), (("r", "q"), False)):
        found = hand_division(run_of(*padded, rows=rows), one, [0, 1])
        assert found == HandDivision(frozenset("w"), is_one_copy=is_one_copy)
    copies = [{"w": digest(1, 2, 3), "b": digest(1)}, {"w": digest(1, 2, 4), "b": digest(1)}]
    assert hand_division(run_of(*copies), one, [0, 1]) is None  # that is a difference


def test_modules_of_some_workers_alone_and_those_with_the_names_of_others() -> None:
    one = run_of({"0.w": digest(1), "1.w": digest(2), "b": digest(1)})
    stages = [{"0.w": digest(1), "b": digest(1)}, {"1.w": digest(2), "b": digest(1)}]
    assert hand_division(run_of(*stages, rows=("r", "r")), one, [0, 1]) == HandDivision(is_one_copy=True)
    experts = [{"0.w": digest(1), "b": digest(1)}, {"0.w": digest(2), "b": digest(1)}]
    found = hand_division(run_of(*experts, rows=("r", "q")), one, [0, 1])
    assert found == HandDivision(elsewhere=frozenset({"0.w", "1.w"}))


def test_parts_that_do_not_begin_with_the_whole_are_not_compared() -> None:
    many = run_of({"w": digest(1, 2)}, {"w": digest(3, 5)})
    with pytest.raises(NotComparable, match="their parts of w do not begin with the values of one process"):
        hand_division(many, run_of({"w": digest(1, 2, 3, 4)}), [0, 1])


@pytest.mark.parametrize(("factor", "causes"), [(1.0, []), (2.0, ["gradients-summed"])])
def test_of_parts_the_norm_is_compared(factor: float, causes: list[str]) -> None:
    def update(gradient: dict[str, Any], bias: dict[str, Any]) -> dict[str, Any]:
        made = {"w": gradient, "b": bias}
        same = {"kind": "update", "optimizer": 0, "n": 1, "rates": [0.1], "forward": [], "losses": [1.0], "nodes": []}
        same |= {"kind_of": "SGD", "modes": {}, "entry": {}, "buffers": {}, "draws": [], "held": ["b", "w"]}
        return {**same, "gradients": made, "back": {}, "parameters": dict(made), "states": {}}

    many = run_of({"w": digest(1, 2)}, {"w": digest(3, 4)})
    one = run_of({"w": digest(4, 3, 2, 1)})
    for record, part in zip(many.records, ((1, 2), (3, 4)), strict=True):
        record.append(update(digest(*(factor * value for value in part)), digest(1)))
    one.records[0].append(update(digest(4, 3, 2, 1), digest(1)))
    mark_parts(many, one, HandDivision(frozenset("w")))
    tolerance = Tolerance(2.0**-23, "")
    made = compare_numbers(many, one, [0, 1], tolerance, parts=False, only_first=True, divided=frozenset("w"))
    assert [found.cause for found in made.findings] == causes
    one.records[0].append({"kind": "end", "with_gradient": [], "held": []})
    assert worker_findings(many, one, [0, 1], parts=False, local=False) == []
