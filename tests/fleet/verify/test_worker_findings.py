"""What the workers have differently, from records made by hand."""

from pathlib import Path
from typing import Any

from fleet.verify.paired_runs import Run
from fleet.verify.worker_findings import _gradients, differing, worker_findings


def update(**changes: Any) -> dict[str, Any]:
    same = {"kind": "update", "n": 1, "rates": [0.1], "modes": {}, "entry": {}, "buffers": {}, "gradients": {}}
    return {**same, "parameters": {}, "held": [], "draws": [], **changes}


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
    assert causes(update(), update(idle=["drop"])) == ["model-in-evaluation-mode"]
    assert causes(update(), update(), held=()) == ["optimizer-of-other-parameters"]


def test_a_codebook_that_nothing_trains_is_begun_with_alike() -> None:
    def begun(*values: float) -> list[str]:
        digests = [{"codes": {"p": value, "s": value**2, "part": "", "n": 1}} for value in values]
        starts = [{"kind": "start", "model": "frozen Quantizer 1", "values": own, "ties": []} for own in digests]
        extra = {"kind": "start", "model": "frozen Linear 1", "values": {"codes": digests[0]["codes"]}, "ties": []}
        many = Run(folder=Path("many"), records=[[extra, starts[0]], [starts[1]]])  # worker 0 looks at one more
        one = Run(folder=Path("one"), records=[[update()]])
        found = worker_findings(many, one, [0, 1], parts=False, local=False)
        return [f"{finding.cause} {finding.tensor}" for finding in found]

    assert begun(1.0, 1.0) == []
    assert begun(1.0, 2.0) == ["initial-weights-differ codes"]


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


def test_a_schedule_that_moves_a_step_for_each_worker_is_no_rate_scaled_twice() -> None:
    squares = [0.01 * n**2 for n in range(1, 12)]
    assert _rates(squares[:6:2], squares[:6]) == []
    assert _rates([3 * rate for rate in squares[:3]], squares[:6]) == ["learning-rate-scaled-twice"]


def test_gradients_that_agree_after_backward_and_not_in_the_update_are_changed_by_the_workers() -> None:
    def worker(back: float, used: float) -> dict[str, Any]:
        def digest(value: float) -> dict[str, Any]:
            return {"w": {"p": value, "s": value**2, "part": "", "n": 1}}

        return update(back=digest(back), gradients=digest(used), parameters=digest(1 - used))

    assert causes(worker(1.0, 0.5), worker(1.0, 0.25)) == ["gradients-changed-by-worker"]
    assert causes(worker(0.5, 0.5), worker(0.25, 0.25)) == ["gradients-not-averaged"]
    many = [worker(0.5, 0.5), worker(0.25, 0.25)]
    (several,) = _gradients(Run(folder=Path("many"), records=[[one] for one in many]), [0, 1])
    assert "its model was not wrapped" in several.sentence
    assert several.where == ""
    around = [{**one, "lines": {"forward": "x.py:6", "around": "x.py:7"}} for one in many]
    (known,) = _gradients(Run(folder=Path("many"), records=[[one] for one in around]), [0, 1])
    assert known.sentence.startswith("A pass went around the wrapped model: this line")
    assert known.where == "x.py:7"


def test_a_parameter_that_a_worker_holds_without_a_gradient_is_not_averaged() -> None:
    def worker(used: float | None, held: list[str]) -> dict[str, Any]:
        def digest(value: float) -> dict[str, Any]:
            return {"w": {"p": value, "s": value**2, "part": "", "n": 1}}

        gradients = {} if used is None else digest(used)
        return update(gradients=gradients, parameters=digest(1 - (used or 0.0)), held=held)

    assert causes(worker(0.5, ["w"]), worker(None, ["w"])) == ["gradients-not-averaged"]
    assert causes(worker(0.5, ["w"]), worker(None, [])) == []  # its owner updates it, and sends it to the others


def test_numbers_on_one_process_alone_are_no_values_to_begin_with() -> None:
    def begun(many: list[str], one: list[str]) -> list[str]:
        runs = [
            Run(folder=Path("x"), records=[[{"kind": "start", "model": "", "values": {}, "ties": [], "unfilled": own}]])
            for own in (many, one)
        ]
        return [found.cause for found in worker_findings(runs[0], runs[1], [0], parts=False, local=False)]

    assert begun(["w"], []) == ["initial-weights-differ"]
    assert begun(["mask"], ["mask"]) == begun([], []) == []


def test_parameters_that_change_are_updated_by_a_copy() -> None:
    def named(*values: float) -> list[str]:
        made = [update(n=n, parameters={"w": {"p": v, "s": v**2, "part": "", "n": 1}}) for n, v in enumerate(values, 1)]
        one = Run(folder=Path("one"), records=[[*made, {"kind": "end", "with_gradient": ["w"], "held": []}]])
        found = worker_findings(Run(folder=Path("many"), records=[[]]), one, [0], parts=False, local=False)
        return [finding.cause for finding in found]

    assert named(1.0, 1.0) == ["optimizer-of-other-parameters"]
    assert named(1.0, 0.9) == []


def test_a_seed_of_the_systems_in_place_of_the_scripts_is_named_where_training_draws() -> None:
    def named(*documents: dict[str, Any]) -> list[str]:
        many = Run(folder=Path("many"), records=[list(documents)])
        return [
            f.where for f in worker_findings(many, Run(folder=Path("one"), records=[[]]), [0], parts=False, local=False)
        ]

    told, again = ({"kind": "reseeded", "where": where} for where in ("x.py:3", ""))
    assert named(told, update(draws=["a"])) == ["x.py:3"]
    assert named(told, update()) == named(told, again, update(draws=["a"])) == named(update(draws=["a"]), told) == []


def test_copies_of_one_shard_are_compared() -> None:
    rows = [{"p": p, "s": 1.0, "part": part} for p, part in ((1.0, "a"), (2.0, "b"), (1.5, "a"), (2.0, "b"))]
    assert differing(rows) == 0.5
    assert differing(rows[:2]) is None


def test_shards_are_not_compared_with_each_other() -> None:
    assert differing([{"p": 1.0, "s": 1.0, "part": "a"}, {"p": 2.0, "s": 1.0, "part": "b"}]) is None
    assert differing([{"p": 1.0, "s": 1.0, "part": ""}, {"p": 2.0, "s": 1.0, "part": ""}]) == 1.0


def test_numbers_that_are_not_finite_on_all_workers_count_as_equal() -> None:
    nan = float("nan")
    assert differing([{"p": nan, "s": nan, "part": ""}] * 2) is None
    assert differing([{"p": nan, "s": nan, "part": ""}, {"p": 1.0, "s": 1.0, "part": ""}]) is not None
