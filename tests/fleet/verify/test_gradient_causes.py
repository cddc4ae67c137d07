"""Gradients that are not those of one process, from projections made by hand."""

from typing import Any

from fleet.verify.gradient_causes import Pair, cause_after_backward, cause_of_factor

ALONE = {"a": 3.0, "b": -2.0, "c": 5.0, "d": 1.0}


def digest(value: float, part: str = "") -> dict[str, Any]:
    return {"p": value, "s": value**2, "n": 4, "part": part}


def pairs_of(got: dict[str, float]) -> tuple[list[Pair], list[Pair]]:
    """Returns the pairs that differ, and all."""
    pairs = [(name, digest(value), digest(got[name])) for name, value in ALONE.items()]
    return [pair for pair in pairs if pair[1]["p"] != pair[2]["p"]], pairs


def test_a_number_of_workers_in_some_gradients_alone_is_named_and_another_factor_of_some_is_not() -> None:
    def cause(factor: float) -> str:
        return cause_of_factor(*pairs_of({**ALONE, "c": factor * ALONE["c"]}), workers=2, nodes=[])[0]

    assert (cause(2.0), cause(0.5), cause(1.3), cause(-1.0)) == ("gradients-summed", "accumulation-loss-count", "", "")
    assert cause_of_factor(*pairs_of({**ALONE, "c": 10.0}), workers=2, nodes=[])[1].startswith("The gradient of c is 2")


def after_backward(shares: dict[str, tuple[float, float]], part: str = "") -> str:
    """Returns the cause where each gradient is a sum of two workers' own, whose mean is that of one process."""
    own = [{name: value + change for name, value in ALONE.items()} for change in (1.0, -1.0)]
    got = {n: shares.get(n, (0.5, 0.5))[0] * own[0][n] + shares.get(n, (0.5, 0.5))[1] * own[1][n] for n in ALONE}
    backs = [{name: digest(value, part and f"{part}{i}") for name, value in one.items()} for i, one in enumerate(own)]
    return cause_after_backward(*pairs_of(got), backs, 1)[0]


def test_what_an_exchange_makes_of_right_gradients_is_no_clipping() -> None:
    assert after_backward({"a": (0.25, 0.5), "b": (0.25, 0.5)}) == "gradients-not-averaged"
    assert after_backward({name: (1.0, 0.0) for name in ALONE}) == "gradients-not-averaged"


def test_one_share_of_each_worker_in_all_gradients_is_clipping_before_the_exchange() -> None:
    assert after_backward({name: (0.4, 0.1) for name in ALONE}) == "gradients-clipped-per-part"
    assert after_backward({"a": (0.4, 0.1)}, part="rows ") == "gradients-clipped-per-part"


def test_a_factor_after_backward_is_a_count_unless_the_workers_hold_parts() -> None:
    assert after_backward({name: (0.35, 0.35) for name in ALONE}) == "accumulation-loss-count"
    assert after_backward({name: (1.0, 1.0) for name in ALONE}) == "gradients-summed"
    assert after_backward({name: (0.35, 0.35) for name in ALONE}, part="rows ") == "gradients-clipped-per-part"
    assert after_backward({name: (1.0, 1.0) for name in ALONE}, part="rows ") == "gradients-summed"
