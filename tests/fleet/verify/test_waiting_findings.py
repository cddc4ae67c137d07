"""Why workers wait for each other, from records made by hand."""

from pathlib import Path
from typing import Any

from fleet.verify.paired_runs import Run
from fleet.verify.waiting_findings import waiting_findings

UPDATE = {"kind": "update", "n": 1}
CALL = {"kind": "collective", "name": "torch.distributed.barrier", "where": "train.py:9"}


def end(how: str, error: str = "") -> dict[str, Any]:
    return {"kind": "end", "how": how, "error": error}


def causes(*workers: list[dict[str, Any]]) -> list[str]:
    return [found.cause for found in waiting_findings(Run(folder=Path("many"), records=list(workers)))]


def test_a_call_of_one_worker_is_named_with_its_line() -> None:
    found = waiting_findings(Run(folder=Path("many"), records=[[UPDATE, CALL], [UPDATE, end("stopped")]]))
    assert [(one.cause, one.rank, one.where) for one in found] == [("collective-on-one-rank", 0, "train.py:9")]


def test_fewer_steps_on_one_worker_are_named() -> None:
    assert causes([UPDATE, UPDATE], [UPDATE, end("ended")]) == ["ranks-take-different-numbers-of-steps"]


def test_runs_that_end_are_right_and_errors_are_left_to_the_caller() -> None:
    assert causes([UPDATE, end("stopped")], [UPDATE, end("ended")]) == []
    assert causes([end("failed", "ValueError: x\n@a.py:1")], [end("failed", "ValueError: x\n@a.py:1")]) == []


def test_a_worker_that_ended_with_an_error_of_its_own_left_out_no_call() -> None:
    assert causes([UPDATE, CALL], [UPDATE, end("failed", "ValueError: x\n@a.py:1")]) == []
    lost = end("failed", "RendezvousError: worker 0 waits in torch.distributed.barrier\n@a.py:1")
    assert causes([UPDATE, CALL], [UPDATE, lost]) == ["collective-on-one-rank"]
