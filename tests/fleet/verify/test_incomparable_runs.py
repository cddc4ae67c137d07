"""What stands in the way of a comparison, from records made by hand."""

from pathlib import Path
from typing import Any

import pytest

from fleet.verify.incomparable_runs import (
    NotComparable,
    error_of,
    foreign_inputs_reason,
    gathering_reason,
    own_failure,
    unequal_draws_reason,
    unseen_draws_reason,
)
from fleet.verify.number_findings import Comparison
from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding


def test_a_call_that_gathers_rows_stands_in_the_way_where_only_gradients_differ() -> None:
    def call_of(*, gathers: bool = True, loss: float = 2.0, cause: str = "unknown", step: int = 2) -> str:
        call = {"kind": "collective", "name": "torch.distributed.all_gather", "where": "x.py:7", "gathers": gathers}
        many = Run(folder=Path("x"), records=[[{"kind": "update"}, call, {"kind": "update"}, {"kind": "update"}]])
        finding = Finding(cause=cause, sentence="", step=step, tensor="gradient of w")
        rows = [{"step": step, "loss_one": 2.0, "loss_many": loss}]
        return gathering_reason(many, Comparison(findings=[finding], rows=rows))

    assert call_of().startswith(
        "torch.distributed.all_gather at x.py:7 exchanges rows that need gradients: at update 2"
    )
    assert call_of(gathers=False) == call_of(loss=2.1) == call_of(step=1) == call_of(step=3) == ""
    assert call_of(cause="loss-sum-instead-of-mean") == gathering_reason(Run(folder=Path("x")), Comparison()) == ""


def test_a_failure_of_verify_is_said_to_be_one() -> None:
    """Also in one process that had made updates: the later ones are missing."""
    error = f"{own_failure(KeyError(7))}\n@train.py:58"
    failed = Run(folder=Path("x"), records=[[{"kind": "update"}, {"kind": "end", "how": "failed", "error": error}]])
    said = r"^fleet verify itself failed: KeyError: 7 \(train.py:58\). This is no mistake of .* --keep FOLDER"
    with pytest.raises(NotComparable, match=said) as raised:
        error_of(failed, 0)
    assert unequal_draws_reason(failed, []) == str(raised.value)
    own = Run(folder=Path("x"), records=[[{"kind": "end", "how": "failed", "error": "KeyError: 7\n@train.py:58"}]])
    assert error_of(own, 0) == "KeyError: 7 (train.py:58)"
    assert unequal_draws_reason(own, []) == ""


def test_rows_that_two_workers_read_themselves_are_counted() -> None:
    def reason(*shares: list[float], contents: tuple[str, str] = ("x", "x")) -> str:
        records: list[list[dict[str, Any]]] = []
        for rows, content in zip(shares, contents, strict=True):
            calls = [{"module": "table", "ins": [None]}, {"module": "", "ins": [{"rows0": rows}]}]
            order = {"kind": "permutation", "name": "randperm", "where": "x.py:7", "n": 9, "content": content}
            records.append([order, {"kind": "update", "n": 1, "forward": calls}])
        return foreign_inputs_reason(Run(folder=Path("x"), records=records), [0, 1], "table")

    shared = reason([1.0, 2.0, 3.0], [3.0, 4.0, 1.0], contents=("x", "y"))
    assert "In the first updates 2 of 4 rows went to more than one worker" in shared
    assert "randperm at x.py:7 differs between the workers" in shared
    assert shared.endswith("Put the rows into a Dataset with a DistributedSampler, and verify can compare the script.")
    for right in (reason([1.0, 2.0], [3.0, 4.0]), reason([1.0, 1.0], [1.0, 1.0])):
        assert "more than one worker" not in right
        assert "randperm" not in right


def test_draws_that_verify_does_not_see_accuse_no_module_after_them() -> None:
    def reason_of(place: dict[str, Any], *, step: int = 2, cause: str = "unknown", tensor: str = "loss") -> str:
        drawing = Run(folder=Path("x"), records=[[{"kind": "update", "n": n, "unseen": place} for n in (2, 3)]])
        finding = Finding(cause=cause, sentence="", step=step, tensor=tensor)
        quiet = Run(folder=Path("x"), records=[[{"kind": "update", "n": 2}]])
        found = {unseen_draws_reason(*runs, [finding]) for runs in ((drawing, quiet), (quiet, drawing))}
        assert len(found) == 1
        return found.pop()

    inside = {"module": "drop", "type": "Dropped", "where": "x.py:7", "ended": True}
    assert reason_of(inside).startswith("drop (Dropped) draws random numbers at x.py:7")
    assert "(Net) draws random numbers before x.py:7" in reason_of({**inside, "type": "Net", "ended": False})
    loop = reason_of({**inside, "module": "", "type": ""}, cause="loss-over-own-batch")
    assert loop.startswith("The training loop draws")
    assert reason_of(inside, cause="batchnorm-statistics", tensor="output")
    assert reason_of(inside, step=1) == reason_of({}) == ""
    assert reason_of(inside, cause="gradients-not-averaged", tensor="gradient of w") == ""
    assert unseen_draws_reason(Run(folder=Path("x")), Run(folder=Path("x")), []) == ""
