"""A reproducible job is compared with one process bit by bit, and what differs first is named with its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.verify.bits.bit_findings import CAUSE, compare_bits
from fleet.verify.paired_runs import Run, Starter, VerifyRequest
from fleet.verify.run_comparison import _Judge
from fleet.verify.tensor_digest import exact_digest
from tests.helpers.sources import ROOT

PLANTED = ROOT / "tests/fleet/verify/planted/bits_depend_on_processes.py"


def digest(value: float) -> dict[str, Any]:
    return exact_digest(torch.full((4,), value))


def turn(rank: int) -> dict[str, Any]:
    call = {"module": "fc", "type": "Linear", "ins": [digest(rank)], "outs": [digest(10 + rank)]}
    return {"drawn": 0, "forward": [call], "losses": [0.5 + rank]}


def update(*ranks: int, n: int = 1) -> dict[str, Any]:
    """Returns what a process that hosts ``ranks`` writes down of an update."""
    return {
        "kind": "update", "optimizer": 0, "n": n, "rates": [0.1], "draws": [],
        "turns": {f"{n} {rank}": turn(rank) for rank in ranks},
        "gradients": {"fc.weight": digest(1)}, "parameters": {"fc.weight": digest(2), "fc.bias": digest(3)},
        "buffers": {"mean": digest(4)}, "states": {"fc.weight exp_avg": digest(5)},
    }  # fmt: skip


def run_of(*updates: dict[str, Any]) -> Run:
    """Returns a run of one update, which each process wrote down."""
    return Run(folder=Path("x"), records=[[one] for one in updates])


ALONE = run_of(update(0, 1, 2))


def found(host: int, change: Any, *, alone: Run = ALONE) -> tuple[str, int | None, str]:
    """Returns tensor, worker and sentence of the first finding after ``change`` of what ``host`` wrote down."""
    ours = [update(0, 1), update(2)]
    change(ours[host])
    made = compare_bits(run_of(*ours), alone)
    assert all(one.cause == CAUSE for one in made.findings)
    first = made.findings[0]
    return first.tensor, first.rank, first.sentence


def test_equal_bits_are_no_finding_on_any_number_of_processes() -> None:
    for hosts in ([[0, 1], [2]], [[0], [1], [2]], [[0, 1, 2]]):
        made = compare_bits(run_of(*(update(*ranks) for ranks in hosts)), ALONE)
        assert (made.findings, made.compared, made.matched) == ([], 1, 2)
        assert made.rows == [
            {"step": 1, "loss_one": 1.5, "loss_many": 1.5, "outputs": 0.0, "gradients": 0.0, "parameters": 0.0}
        ]


def test_a_weight_that_one_process_changes_is_named_before_its_consequences() -> None:
    def nudge(one: dict[str, Any]) -> None:
        one["parameters"]["fc.bias"] = digest(3.0000002)
        one["turns"]["1 2"]["forward"][0]["outs"] = [digest(99)]

    tensor, worker, sentence = found(1, nudge)
    assert (tensor, worker) == ("fc.bias", 1)
    assert "something changes it on this process alone" in sentence
    tensor, worker, _ = found(0, lambda one: one["parameters"].update({"fc.bias": digest(7)}))
    assert (tensor, worker) == ("fc.bias", 0)


def test_other_inputs_name_the_logical_worker_and_its_process() -> None:
    def other(one: dict[str, Any]) -> None:
        one["turns"]["1 2"]["forward"][0] |= {"ins": [digest(50)], "outs": [digest(60)]}

    tensor, worker, sentence = found(1, other)
    assert (tensor, worker) == ("input", 1)
    assert "fc (Linear) of logical worker 2, hosted by worker 1, has other inputs" in sentence


def test_other_outputs_of_the_same_inputs_are_draws_or_kernels() -> None:
    def outputs(one: dict[str, Any]) -> None:
        one["turns"]["1 1"]["forward"][0]["outs"] = [digest(60)]

    def draws(one: dict[str, Any]) -> None:
        outputs(one)
        one["draws"] = ["other"]

    assert "its weights, kernels or unseen draws are others" in found(0, outputs)[2]
    assert "its random draws are others" in found(0, draws)[2]


def test_losses_gradients_states_and_buffers_are_compared() -> None:
    assert found(0, lambda one: one["turns"]["1 1"].update(losses=[1.5000000000000002]))[0] == "loss"
    alone = copy.deepcopy(ALONE)
    for kind, name in (("states", "fc.weight exp_avg"), ("buffers", "mean"), ("gradients", "fc.weight")):
        alone.records[0][0][kind][name] = digest(8)
        expected = f"gradient of {name}" if kind == "gradients" else name
        assert found(1, lambda one: None, alone=alone)[0] == expected


def test_a_rate_that_depends_on_the_number_of_processes_is_named_first() -> None:
    alone = copy.deepcopy(ALONE)
    alone.records[0][0] |= {"rates": [0.05], "parameters": {"fc.weight": digest(9)}}
    assert found(1, lambda one: None, alone=alone)[0] == "learning rate"


def test_other_turns_and_other_calls_are_named() -> None:
    assert "batches of the logical workers [0, 1] on the workers" in found(1, lambda one: one["turns"].clear())[2]
    assert "calls other modules" in found(1, lambda one: one["turns"]["1 2"]["forward"].clear())[2]


def test_another_number_of_updates_is_a_finding() -> None:
    more = Run(folder=Path("x"), records=[[update(0, 1, 2), update(0, 1, 2, n=2)]])
    (finding,) = compare_bits(more, ALONE).findings
    assert (finding.cause, finding.step) == ("ranks-take-different-numbers-of-steps", 2)


_NOISE = "x + 0.1 * torch.randn(x.shape, generator=noise)"
# In its last turn of an update: in those before it a changed weight is refused.
_NUDGE = (
    "    from fleet.job.running import running_job\n"
    "    if fleet.worker_index() == 1 and sampler.done > 32 and running_job().logical.is_last:\n"
    "        with torch.no_grad():\n"
    "            net[2].bias[0] += 1e-7\n"
)
_STEP = "    optimizer.step()\n"
# What is put in the place of what in the planted script, whose noise becomes right by the first; tensor and worker.
FAULTS: dict[str, tuple[str, str, tuple[str, int] | None]] = {
    "right": ("", "", None),
    "weights nudged on worker 1": (_STEP, _NUDGE + _STEP, ("2.bias", 1)),
    "rows by physical rank": ("mse_loss(model(", "mse_loss(model(fleet.worker_index() + ", ("input", 1)),
    "a loss by physical rank": (", y).backward()", ", y).mul(1 + fleet.worker_index()).backward()", ("loss", 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAULTS))
@pytest.mark.parametrize("workers", [2, 3])
def test_a_planted_fault_is_named(name: str, workers: int, tmp_path: Path, starter: Starter) -> None:
    old, new, expected = FAULTS[name]
    text = PLANTED.read_text(encoding="utf-8")
    assert text.count(_NOISE) == 1
    assert text.count(old or _NOISE) == 1
    script = tmp_path / "train.py"
    script.write_text(text.replace(_NOISE, "x + 0.1 * torch.randn_like(x)").replace(old, new), encoding="utf-8")
    report = _Judge(VerifyRequest(script=script, workers=workers, timeout_s=120), tmp_path / "runs", starter).report()
    assert report.tolerance["relative"] == 0
    assert "all 4 logical workers" in report.tolerance["text"]
    if expected is None:
        assert (report.outcome, report.steps, report.findings) == ("equal", 6, []), report.notes
        return
    assert report.outcome == "differs", report.notes
    assert (report.findings[0].tensor, report.findings[0].rank) == expected, report.findings
    assert report.findings[0].where.startswith(f"{script}:")
