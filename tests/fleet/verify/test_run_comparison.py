"""A correct script is equal, and an option that is set to nothing is a finding."""

from pathlib import Path

import pytest

from fleet.verify.paired_runs import Run, VerifyRequest
from fleet.verify.run_comparison import _idle_options, _Judge, _NotComparable, _nothing, compare_runs

FOLDER = Path(__file__).parent


def test_an_option_that_its_settings_leave_idle_is_a_finding_and_one_that_the_machine_does_is_not() -> None:
    notes = ["amp changes nothing: amp_configs['x'] is 0.", "dgc changes nothing on the CPU."]
    assert [found.tensor for found in _idle_options({"notes": notes, "plan": ["amp", "dgc"]})] == ["amp"]


def reason(folder: Path, *errors: str) -> str:
    """Returns why workers that ended with these errors are not compared."""
    records = [[{"kind": "end", "how": "failed" if error else "ended", "error": error}] for error in errors]
    with pytest.raises(_NotComparable) as caught:
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


def test_an_exit_shows_what_was_printed_before(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("x.py: error: the following arguments are required: --data\n", encoding="utf-8")
    assert "SystemExit: 2\nx.py: error: the following arguments" in reason(tmp_path, "SystemExit: 2\n@", "")
    (tmp_path / "rank0.log").write_text("", encoding="utf-8")
    assert _nothing(Run(folder=tmp_path, records=[[]])).endswith("worker 0 printed nothing.")


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
