"""What the workers have differently, from records made by hand."""

from pathlib import Path
from typing import Any

from fleet.verify.paired_runs import Run
from fleet.verify.worker_findings import differing, worker_findings


def update(**changes: Any) -> dict[str, Any]:
    same = {"kind": "update", "n": 1, "rates": [0.1], "modes": {}, "entry": {}, "buffers": {}, "gradients": {}}
    return {**same, "parameters": {}, "draws": [], **changes}


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
    assert causes(update(draws=["a"]), update(draws=["a"])) == ["dropout-seeded-alike"]
    assert causes(update(draws=["a"]), update(draws=["b"])) == []
    assert causes(update(), update(), held=()) == ["optimizer-of-other-parameters"]


def _rates(many: list[float], one: list[float]) -> list[str]:
    ours = [update(n=n, rates=[rate]) for n, rate in enumerate(many, 1)]
    alone = [update(n=n, rates=[rate]) for n, rate in enumerate(one, 1)]
    end = {"kind": "end", "how": "stopped", "with_gradient": ["w"], "held": ["w"]}
    workers = Run(folder=Path("many"), records=[ours, ours])
    found = worker_findings(workers, Run(folder=Path("one"), records=[[*alone, end]]), [0, 1], parts=False, local=False)
    return [finding.cause for finding in found]


def test_a_schedule_made_for_the_workers_is_no_rate_scaled_twice() -> None:
    assert _rates([0.1, 0.1, 0.05, 0.05], [0.1, 0.05, 0.025, 0.0125]) == []
    assert _rates([0.1, 0.2, 0.4], [0.1, 0.1, 0.1]) == ["learning-rate-scaled-twice"]


def test_gradients_that_agree_after_backward_and_not_in_the_update_are_changed_by_the_workers() -> None:
    def worker(back: float, used: float) -> dict[str, Any]:
        def digest(value: float) -> dict[str, Any]:
            return {"w": {"p": value, "s": value**2, "part": "", "n": 1}}

        return update(back=digest(back), gradients=digest(used), parameters=digest(1 - used))

    assert causes(worker(1.0, 0.5), worker(1.0, 0.25)) == ["gradients-changed-by-worker"]
    assert causes(worker(0.5, 0.5), worker(0.25, 0.25)) == ["gradients-not-averaged"]


def test_shards_are_not_compared_with_each_other() -> None:
    assert differing([{"p": 1.0, "s": 1.0, "part": "a"}, {"p": 2.0, "s": 1.0, "part": "b"}]) is None
    assert differing([{"p": 1.0, "s": 1.0, "part": ""}, {"p": 2.0, "s": 1.0, "part": ""}]) == 1.0


def test_numbers_that_are_not_finite_on_all_workers_count_as_equal() -> None:
    nan = float("nan")
    assert differing([{"p": nan, "s": nan, "part": ""}] * 2) is None
    assert differing([{"p": nan, "s": nan, "part": ""}, {"p": 1.0, "s": 1.0, "part": ""}]) is not None
