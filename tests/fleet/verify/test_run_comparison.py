"""A correct script is equal, and an option that is set to nothing is a finding."""

from pathlib import Path
from typing import Any

import pytest

from fleet.verify.incomparable_runs import NotComparable, no_update_reason
from fleet.verify.number_findings import Comparison
from fleet.verify.paired_runs import Run, VerifyRequest
from fleet.verify.report import Finding
from fleet.verify.run_comparison import _could_be_rounding, _Judge, _takes_turns, compare_runs
from fleet.verify.worker_findings import idle_options

FOLDER = Path(__file__).parent


def test_an_option_that_its_settings_leave_idle_is_a_finding_and_one_that_the_machine_does_is_not() -> None:
    notes = ["amp changes nothing: amp_configs['x'] is 0.", "dgc changes nothing on the CPU."]
    assert [found.tensor for found in idle_options({"notes": notes, "plan": ["amp", "dgc"]})] == ["amp"]


def reason(folder: Path, *errors: str) -> str:
    """Returns why workers that ended with these errors are not compared."""
    records = [[{"kind": "end", "how": "failed" if error else "ended", "error": error}] for error in errors]
    with pytest.raises(NotComparable) as caught:
        _Judge(VerifyRequest(script=folder / "x.py"), folder, lambda plan: 0)._need_end(
            Run(folder=folder, records=records)
        )
    return str(caught.value)


def test_the_error_of_the_worker_that_failed_first_is_shown_with_its_line(tmp_path: Path) -> None:
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:4\n@/x/train.py:12"
    assert "worker 1: ValueError: no data (/x/train.py:8)" in reason(
        tmp_path, lost, "ValueError: no data\n@/x/train.py:8"
    )
    assert "worker 0: RuntimeError" in reason(tmp_path, lost, lost)
    waits = "RendezvousError: this worker waits in fleet.init(); worker 1 has ended\n@/x/train.py:12"
    assert "worker 1: KeyError" in reason(tmp_path, waits, "KeyError: 'x'\n@/x/train.py:8")


def test_one_process_without_the_options_that_compute_is_not_compared(tmp_path: Path) -> None:
    def reason_of(computing: list[str], engine: str) -> str:
        records = [[{"kind": "job", "engine": engine}, {"kind": "end", "how": "ended", "error": ""}]]
        judge = _Judge(VerifyRequest(script=tmp_path / "x.py"), tmp_path, lambda plan: 0)
        try:
            judge._need_one(Run(folder=tmp_path, records=records), {"engine": "fleet", "computing": computing})
        except NotComparable as found:
            return str(found)
        return ""

    assert reason_of([], "") == reason_of(["amp"], "fleet") == ""
    assert "One process does not call fleet.init(), such as behind `if distributed:`" in reason_of(["amp"], "")


def test_workers_that_form_no_job_and_a_strategy_for_none_are_refused(tmp_path: Path) -> None:
    def reason_of(engine: str, strategy: str = "") -> str:
        try:
            request = VerifyRequest(script=tmp_path / "x.py", strategy=strategy)
            _Judge(request, tmp_path, lambda plan: 0)._need_job({"engine": engine})
        except NotComparable as found:
            return str(found)
        return ""

    assert "calls neither fleet.init() nor" in reason_of("")
    assert "trains without a call of fleet.init()" in reason_of("torch", "s.yaml")
    assert reason_of("torch") == reason_of("fleet", "s.yaml") == ""


def test_one_process_takes_turns_where_it_makes_the_passes_of_all_workers() -> None:
    def run_of(backwards: int) -> Run:
        return Run(folder=Path("x"), records=[[{"kind": "update", "n": 1, "backwards": backwards}]])

    assert _takes_turns(run_of(2), run_of(4), [0, 1])
    assert not _takes_turns(run_of(2), run_of(2), [0, 1])
    assert not _takes_turns(run_of(0), run_of(0), [0, 1])  # a pipeline makes its passes itself
    assert not _takes_turns(run_of(1), run_of(1), [0])


def test_an_exit_shows_what_was_printed_before(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("x.py: error: the following arguments are required: --data\n", encoding="utf-8")
    assert "SystemExit: 2\nx.py: error: the following arguments" in reason(tmp_path, "SystemExit: 2\n@", "")
    (tmp_path / "rank0.log").write_text("", encoding="utf-8")
    assert no_update_reason(Run(folder=tmp_path, records=[[]])).endswith("worker 0 printed nothing.")


@pytest.mark.slow
def test_a_correct_script_is_equal_in_three_steps(tmp_path: Path) -> None:
    request = VerifyRequest(script=FOLDER / "clean" / "scaled_loss.py", steps=3)
    report = compare_runs(request, tmp_path / "records")
    assert (report.outcome, report.steps, report.findings) == ("equal", 3, [])
    assert (tmp_path / "records" / "many" / "rank1" / "events.jsonl").exists()


_TRACKED = """
import torch
from fleet import fleet

strategy = fleet.DistributedStrategy()
strategy.trackers = ["json"]
strategy.tracker_configs = {{"folder": "{folder}"}}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(0)
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
rows = torch.utils.data.TensorDataset(torch.randn(64, 4))
sampler = torch.utils.data.DistributedSampler(rows, fleet.worker_num(), fleet.worker_index())
for (x,) in torch.utils.data.DataLoader(rows, batch_size=4, sampler=sampler):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    fleet.log({{"loss": loss}})
"""


@pytest.mark.slow
def test_trackers_get_nothing_of_a_comparison(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_TRACKED.format(folder=tmp_path / "runs"), encoding="utf-8")
    report = compare_runs(VerifyRequest(script=script, steps=2), tmp_path / "records")
    assert (report.outcome, report.findings) == ("equal", [])
    assert not (tmp_path / "runs").exists()


def test_what_is_not_seeded_is_looked_for_once(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    judge = _Judge(VerifyRequest(script=tmp_path / "x.py"), tmp_path, lambda plan: 0)
    assert judge._again(Run(folder=tmp_path, records=[[]])) == []


def compared(folder: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Finding], *, drawn: list[str]) -> _Judge:
    """Returns what is found of workers that differ by ``seen``, beside a gradient that rounding errors move."""
    judge = _Judge(VerifyRequest(script=folder / "x.py"), folder, lambda plan: 0)
    moved = Finding(cause="unknown", sentence="", step=4, tensor="gradient of w")

    def numbers(*given: Any) -> Comparison:
        return Comparison(findings=[] if given[4] is not None and not drawn else [moved], matched=1, compared=4)

    for name in ("data_findings", "uneven_steps", "data_notes"):
        monkeypatch.setattr(f"fleet.verify.run_comparison.{name}", lambda *given: [])
    monkeypatch.setattr("fleet.verify.run_comparison.worker_findings", lambda *given, **named: seen)
    monkeypatch.setattr(judge, "_compare_numbers", numbers)
    monkeypatch.setattr(judge, "_note_equal_things", lambda *given: None)
    one = Run(folder=folder, records=[[{"kind": "end", "how": "stopped", "unequal_draws": drawn}]])
    job = {"plan": [], "parts": False, "notes": []}
    judge._compare(Run(folder=folder, records=[[], []]), one, [0, 1], job, lambda *given, **named: one)
    return judge


def test_workers_that_draw_alike_are_compared_up_to_rounding_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = Finding(cause="dropout-seeded-alike", sentence="", step=1)
    judge = compared(tmp_path, monkeypatch, [seeds], drawn=[])
    assert judge.findings == []
    assert [warning.cause for warning in judge.warnings] == ["dropout-seeded-alike"]


def test_draws_that_one_process_was_not_given_are_no_mistake_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that flattens padded batches has a mask for each place of them."""
    with pytest.raises(NotComparable, match="could not be given what the workers drew with dropout"):
        compared(tmp_path, monkeypatch, [], drawn=["dropout"])


@pytest.mark.parametrize(
    ("cause", "step", "tensor", "could_be"),
    [
        ("unknown", 1, "gradient of w", True),
        ("batchnorm-statistics", 3, "output", True),
        ("batchnorm-statistics", 1, "output", False),
        ("gradients-summed", 3, "gradient of w", False),
    ],
)
def test_a_module_whose_outputs_come_apart_after_an_update_may_show_rounding_errors(
    cause: str, step: int, tensor: str, could_be: bool
) -> None:
    """Which differences grow to what is compared at depends on the machine's sums, so the rule is tested by itself."""
    assert _could_be_rounding(Finding(cause=cause, sentence="", step=step, tensor=tensor)) is could_be
