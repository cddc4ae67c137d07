"""The mean of the workers' gradients beside that of one process, from records made by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.verify.number_findings import Tolerance, compare_numbers, grown_errors, until_lost, whole
from fleet.verify.paired_runs import Run
from fleet.verify.record_files import RecordFile
from fleet.verify.tensor_digest import rows_digest, whole_digest

G = torch.randn(20, generator=torch.Generator().manual_seed(0))


def update(gradient: torch.Tensor, *nodes: str) -> dict[str, Any]:
    digest = {"w": whole_digest(gradient)}
    same = {"kind": "update", "optimizer": 0, "n": 1, "rates": [0.1], "forward": [], "losses": [1.0], "kind_of": "SGD"}
    return {**same, "nodes": list(nodes), "gradients": digest, "back": digest, "parameters": {}, "states": {}}


def causes(workers: list[torch.Tensor], *nodes: str) -> list[str]:
    many = Run(folder=Path("many"), records=[[update(g)] for g in workers])
    one = Run(folder=Path("one"), records=[[update(G, *nodes)]])
    made = compare_numbers(many, one, [0, 1], Tolerance(2.0**-23, ""), parts=False, only_first=False)
    assert made.matched
    return [found.cause for found in made.findings]


def test_rounding_errors_are_no_finding() -> None:
    assert causes([G * (1 + 1e-6)] * 2) == []


@pytest.mark.parametrize(
    ("factor", "node", "cause"),
    [
        (2.0, "MeanBackward0", "gradients-summed"),
        (0.5, "NllLossBackward0 sum", "loss-sum-instead-of-mean"),
        (0.5, "DivBackward0", "accumulation-loss-count"),
    ],
)
def test_a_factor_names_its_cause(factor: float, node: str, cause: str) -> None:
    assert causes([G * factor] * 2, node) == [cause]


def test_a_loss_that_is_no_mean_over_samples_is_named() -> None:
    workers = [{**update(G * torch.linspace(0.5, 1.5, 20)), "losses": [loss]} for loss in (1.0, 2.0)]
    for loss, cause in ((1.8, "loss-over-own-batch"), (1.5, "unknown")):
        many = Run(folder=Path("many"), records=[[worker] for worker in workers])
        one = Run(folder=Path("one"), records=[[{**update(G), "losses": [loss]}]])
        made = compare_numbers(many, one, [0, 1], Tolerance(2.0**-23, ""), parts=False, only_first=False)
        assert [found.cause for found in made.findings] == [cause]


def test_a_loss_over_fewer_positions_is_named_in_whichever_batch_of_the_update_it_was() -> None:
    workers = [{**update(G * torch.linspace(0.9, 1.1, 20)), "losses": losses} for losses in ([1.0, 2.0], [1.2, 2.2])]
    for alone, cause in (([1.10003, 2.1], "loss-over-own-batch"), ([1.10001, 2.1], "unknown")):
        many = Run(folder=Path("many"), records=[[worker] for worker in workers])
        one = Run(folder=Path("one"), records=[[{**update(G), "losses": alone}]])
        made = compare_numbers(many, one, [0, 1], Tolerance(2.0**-23, ""), parts=False, only_first=False)
        assert [found.cause for found in made.findings] == [cause]


def test_batches_that_are_not_those_of_the_workers_are_noticed() -> None:
    def passed(rows: torch.Tensor) -> dict[str, Any]:
        call = {"module": "0", "type": "Linear", "ins": [rows_digest(rows)], "outs": []}
        return {**update(G), "forward": [call]}

    x = torch.arange(12.0).view(4, 3)
    for mine, foreign in ((x + 1, "0"), (x, "")):  # a table of positions is the same everywhere
        many = Run(folder=Path("many"), records=[[passed(x)], [passed(x)]])
        one = Run(folder=Path("one"), records=[[passed(mine)]])
        made = compare_numbers(many, one, [0, 1], Tolerance(2.0**-23, ""), parts=False, only_first=False)
        assert made.foreign_inputs == foreign


def test_other_rows_in_more_batches_are_noticed() -> None:
    def update_of(*batches: torch.Tensor) -> dict[str, Any]:
        calls = [{"module": "", "type": "Net", "ins": [rows_digest(rows)], "outs": []} for rows in batches]
        return {**update(G), "forward": calls}

    a, b, c = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(1)).unbind()
    for alone, foreign in (([a, b], ""), ([a, c], "Net")):
        many = Run(folder=Path("many"), records=[[update_of(a)], [update_of(b)]])
        one = Run(folder=Path("one"), records=[[update_of(*alone)]])
        made = compare_numbers(many, one, [0, 1], Tolerance(2.0**-23, ""), parts=False, only_first=False)
        assert made.foreign_inputs == foreign


def test_a_module_that_gives_other_outputs_says_why_where_its_kind_does() -> None:
    def called(rows: torch.Tensor) -> dict[str, Any]:
        call = {"module": "out", "type": "Linear", "ins": [], "outs": [rows_digest(rows)]}
        return {**update(G), "forward": [call]}

    x = torch.arange(12.0).view(4, 3)
    for modes, ties, cause in (
        ({}, [], "unknown"),
        ({"out": True}, [], "batchnorm-statistics"),
        ({}, [["in.weight", "out.weight"]], "tied-weights-apart"),
    ):
        many = Run(folder=Path("many"), records=[[called(part + 1)] for part in x.chunk(2)])
        begun = {"kind": "start", "model": "", "ties": ties}
        one = Run(folder=Path("one"), records=[[begun, {**called(x), "modes": modes}]])
        made = compare_numbers(many, one, [0, 1], Tolerance(2.0**-23, ""), parts=False, only_first=False)
        assert [found.cause for found in made.findings] == [cause]


def test_other_outputs_make_no_loss_over_a_workers_own_batch() -> None:
    def worker(shift: float, loss: float) -> dict[str, Any]:
        call = {"module": "out", "type": "Linear", "ins": [], "outs": [rows_digest(torch.ones(2, 3) + shift)]}
        return {**update(G * torch.linspace(0.5, 1.5, 20)), "losses": [loss], "forward": [call]}

    for shift, cause in ((0.0, "loss-over-own-batch"), (1.0, "unknown")):
        alone = {"module": "out", "type": "Linear", "ins": [], "outs": [rows_digest(torch.ones(4, 3))]}
        many = Run(folder=Path("many"), records=[[worker(shift, loss)] for loss in (1.0, 2.0)])
        one = Run(folder=Path("one"), records=[[{**update(G), "losses": [1.8], "forward": [alone]}]])
        made = compare_numbers(many, one, [0, 1], Tolerance(2.0**-23, ""), parts=False, only_first=False)
        assert made.findings[0].cause == cause


def test_shards_add_up_and_copies_are_averaged() -> None:
    digest = {"p": 1.0, "s": 1.0, "n": 4}
    assert whole([{**digest, "part": "a"}, {**digest, "part": "b"}]) == {"p": 2.0, "s": 2.0, "n": 8}
    assert whole([{**digest, "part": ""}, {**digest, "part": ""}]) == {"p": 1.0, "s": 1.0, "n": 4}


def test_what_rounding_grows_to_is_allowed_and_too_much_is_not_compared() -> None:
    alone, tried = (Run(folder=Path("one"), records=[[update(g)]]) for g in (G, G * 1.01))
    grown = grown_errors(alone, tried)
    assert grown == {1: pytest.approx(0.01 * abs(float(whole_digest(G)["p"])) / float(G.norm()), rel=1e-3)}
    many = Run(folder=Path("many"), records=[[update(G * 1.02)]] * 2)
    for errors, compared, found in [({}, 1, 1), (grown, 1, 0), ({1: grown[1] / 11}, 1, 1), ({1: 0.03}, 0, 0)]:
        made = compare_numbers(many, alone, [0, 1], Tolerance(2.0**-23, "", errors), parts=False, only_first=False)
        assert (made.compared, len(made.findings)) == (compared, found)


def test_what_rounding_makes_of_adams_parameters_is_within_the_rate() -> None:
    def grown(kind: str) -> float:
        runs = [{**update(G), "kind_of": kind, "parameters": {"w": whole_digest(value)}} for value in (G, G * 1.5)]
        one, tried = (Run(folder=Path("x"), records=[[run]]) for run in runs)
        return grown_errors(one, tried)[1]

    assert grown("SGD") > 0.01
    assert grown("AdamW") == 0.0


def test_gradients_that_are_not_finite_in_both_runs_are_left_out() -> None:
    broken = G * float("nan")
    one = Run(folder=Path("one"), records=[[update(broken)]])
    for gradient, left_out, found in [(broken, [1], 0), (G, [], 1)]:
        many = Run(folder=Path("many"), records=[[update(gradient)]] * 2)
        made = compare_numbers(many, one, [0, 1], Tolerance(2.0**-23, ""), parts=False, only_first=False)
        assert (made.not_finite, len(made.findings)) == (left_out, found)


def test_a_trial_ends_where_all_is_lost_and_later_updates_count_as_lost(tmp_path: Path) -> None:
    known = [{**update(G), "n": n} for n in (1, 2, 3)]
    record = RecordFile(tmp_path)
    for one in known:
        record.write(**one)
    record.close()
    is_lost = until_lost(tmp_path)
    tried = [{**update(G * (1 + change)), "n": n} for n, change in ((1, 1e-5), (2, 0.2))]
    assert [is_lost(one) for one in tried] == [False, True]
    alone = Run(folder=tmp_path, records=[known])
    grown = grown_errors(alone, Run(folder=tmp_path, records=[tried]))
    tolerance = Tolerance(2.0**-23, "", grown)
    assert [tolerance.is_lost(n) for n in (1, 2, 3)] == [False, True, True]
    assert list(grown_errors(alone, Run(folder=tmp_path, records=[tried[:1]]))) == [1]
