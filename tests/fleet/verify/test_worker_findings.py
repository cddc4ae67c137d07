"""What the workers have differently, from records made by hand."""

from pathlib import Path
from typing import Any

from fleet.verify.paired_runs import Run
from fleet.verify.worker_findings import differing, worker_findings


def update(**changes: Any) -> dict[str, Any]:
    same = {"kind": "update", "n": 1, "rates": [0.1], "modes": {}, "entry": {}, "buffers": {}, "gradients": {}}
    return {**same, "parameters": {}, "masks": [], **changes}


def causes(*workers: dict[str, Any], held: tuple[str, ...] = ("w",)) -> list[str]:
    many = Run(folder=Path("many"), records=[[worker] for worker in workers])
    end = {"kind": "end", "how": "stopped", "with_gradient": ["w"], "held": list(held)}
    one = Run(folder=Path("one"), records=[[update(), end]])
    return [found.cause for found in worker_findings(many, one, [0, 1], parts=False, local=False)]


def test_equal_workers_are_right() -> None:
    assert causes(update(), update()) == []


def test_what_differs_is_named() -> None:
    assert causes(update(), update(rates=[0.05])) == ["scheduler-stepped-unevenly"]
    assert causes(update(rates=[0.4]), update(rates=[0.4])) == ["learning-rate-scaled-twice"]
    assert causes(update(modes={"n": True}), update(modes={"n": False})) == ["batchnorm-statistics"]
    assert causes(update(masks=["a"]), update(masks=["a"])) == ["dropout-seeded-alike"]
    assert causes(update(masks=["a"]), update(masks=["b"])) == []
    assert causes(update(), update(), held=()) == ["optimizer-of-other-parameters"]


def test_shards_are_not_compared_with_each_other() -> None:
    assert differing([{"p": 1.0, "s": 1.0, "part": "a"}, {"p": 2.0, "s": 1.0, "part": "b"}]) is None
    assert differing([{"p": 1.0, "s": 1.0, "part": ""}, {"p": 2.0, "s": 1.0, "part": ""}]) == 1.0


def test_numbers_that_are_not_finite_on_all_workers_count_as_equal() -> None:
    nan = float("nan")
    assert differing([{"p": nan, "s": nan, "part": ""}] * 2) is None
    assert differing([{"p": nan, "s": nan, "part": ""}, {"p": 1.0, "s": 1.0, "part": ""}]) is not None
