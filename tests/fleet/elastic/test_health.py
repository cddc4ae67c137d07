"""Whole jobs: a worker that hangs or stops is named, killed and started again; SIGTERM saves the job."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

import fleet
from fleet.elastic import PREEMPTED, ElasticSampler
from fleet.errors import NotInitializedError
from tests.helpers.fleets import own_fleet
from tests.launch.launcher import Launcher, wait_until_gone

TRAIN = """
import os, sys, time, torch, fleet
from torch.utils.data import DataLoader
steps, option, workers = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
strategy = fleet.DistributedStrategy()
if option != "none":
    setattr(strategy, option, True)
    setattr(strategy, option + "_configs", {"k_steps": 5})
fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
torch.manual_seed(0)
net = torch.nn.Linear(1, 4)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.01))
model = fleet.distributed_model(net)
data = torch.arange(4000.0).view(-1, 1)
sampler = fleet.elastic.ElasticSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler, num_workers=workers)
checkpoint = fleet.elastic.Checkpoint("checkpoints", model, optimizer, data=sampler, every=int(sys.argv[4]))
checkpoint.resume()
print(f"begins at {checkpoint.step} {sampler.done} pid {os.getpid()}", flush=True)
seen = open(f"seen.{fleet.worker_index()}", "a")
sampler.set_epoch(0)
for batch in sampler.batches(loader):
    model(batch / 4000).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(*batch.view(-1).int().tolist(), file=seen, flush=True)
    if checkpoint.step == 3:
        print("three", flush=True)
    time.sleep(0.02)
    if checkpoint.step == steps:
        break
checkpoint.save()
print(f"ends at {checkpoint.step}", flush=True)
"""
TWO = ("--nproc_per_node=2",)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "stop"])
def test_a_hung_or_stopped_worker_is_named_killed_and_started_again(fault: str, tmp_path: Path) -> None:
    """The study: noticed by neither torchrun nor Paddle in 75 s.

    A stopped worker is continued for its stack, and trains on for the moment until it is killed: up to a second, which
    is less than the 60 steps take.
    """
    faults = {"FLEET_FAULTS": f"step:{fault}:rank=1:step=7:generation=0"}
    flags = (*TWO, "--heartbeat_timeout=3", "--max_restart=1")
    with Launcher(tmp_path, TRAIN, *flags, env=faults, args=("60", "none", "0", "5")) as job:
        assert job.wait(58) == 0, job.stderr
        assert re.search(
            r"rank 1 has not finished step 8 for \d+ s; .*it is at \S*train\.py:24 in <module>", job.stderr
        )
        assert re.search(r"rank 0 waits for other ranks in step 8; it is at \S*train\.py:23 in <module>", job.stderr)
        assert ("was stopped by a signal (SIGSTOP)" in job.stderr) == (fault == "stop")
        assert "Stack of rank 0" in job.stderr
        assert "_engine_run_backward" in job.stderr
        first, second = (int(step) for step in re.findall(r"begins at (\d+) ", job.log("workerlog.1")))
        assert (first, second % 5) == (0, 0)
        assert second == 5 if fault == "hang" else 5 <= second < 60
        assert f"begins at {second} {4 * second} " in job.log("workerlog.1")
        assert "ends at 60" in job.log("workerlog.1")
        noticed = job.stderr.index("has not finished")
        assert "Restart 1 of 1" in job.stderr[noticed:]


@pytest.mark.slow
def test_without_restarts_the_reason_stands_in_the_report(tmp_path: Path) -> None:
    faults = {"FLEET_FAULTS": "step:hang:rank=0:step=4", "FLEET_HEARTBEAT_TIMEOUT": "2"}
    with Launcher(tmp_path, TRAIN, env=faults, args=("12", "none", "0", "0")) as job:
        assert job.wait(50) == 137
        assert "The launcher killed it: it had not finished step 5 for" in job.stderr
        assert "lack of memory" not in job.stderr


@pytest.mark.slow
def test_evaluations_and_ends_are_no_hangs(tmp_path: Path) -> None:
    script = TRAIN.replace("checkpoint.save()\n", "fleet.heartbeat(pause=True)\ntime.sleep(6)\n") + "time.sleep(2)\n"
    with Launcher(tmp_path, script, "--heartbeat_timeout=4", args=("12", "none", "0", "0")) as job:
        assert job.wait(50) == 0, job.stderr


def seen_by(folder: Path, rank: int) -> list[str]:
    """The batches that a rank trained on, over all runs."""
    return (folder / f"seen.{rank}").read_text().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("option", ["none", "localsgd", "gradient_merge"])
def test_sigterm_saves_and_the_next_start_goes_on(option: str, tmp_path: Path) -> None:
    """peers: elsewhere the signal reaches data-loader processes first, and the emergency save never runs."""
    arguments, cut = (option, "2", "0"), tmp_path
    with Launcher(cut, TRAIN, *TWO, "--preempt_grace=30", args=("60", *arguments)) as job:
        job.wait_for("three")
        job.signal(signal.SIGTERM)
        assert job.wait(40) == PREEMPTED, job.stderr
        assert "The workers have saved and stopped" in job.stderr
        assert "Exit code 75" in job.stderr
    (saved,) = (cut / "checkpoints").iterdir()
    with Launcher(cut, TRAIN, *TWO, args=("60", *arguments)) as job:
        assert job.wait(50) == 0, job.stderr
        assert f"begins at {int(saved.name[5:])} " in job.log("workerlog.1")
    for rank in range(2):
        order = list(ElasticSampler(range(4000), num_workers=2, rank=rank))
        assert seen_by(cut, rank) == [f"{a} {b}" for a, b in zip(order[:120:2], order[1:120:2], strict=True)]


@pytest.mark.slow
def test_who_does_not_stop_within_the_grace_is_ended(tmp_path: Path) -> None:
    script = "import time, fleet\nfleet.init(is_collective=True)\nprint('three', flush=True)\ntime.sleep(100)\n"
    flags = ("--preempt_grace=1", "--shutdown_timeout=1")
    with Launcher(tmp_path, script, *flags) as job:
        job.wait_for("three")
        began = time.monotonic()
        job.signal(signal.SIGTERM)
        assert job.wait(30) == 143
        assert 1 <= time.monotonic() - began < 8
        assert "is over, and not every worker has stopped" in job.stderr


def test_a_script_without_fleet_gets_sigterm_and_the_grace(tmp_path: Path) -> None:
    """It may save by itself; its exit code 75 says so."""
    script = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(75)))\n"
        "print('three', flush=True)\ntime.sleep(100)\n"
    )
    with Launcher(tmp_path, script, "--preempt_grace=20") as job:
        job.wait_for("three")
        job.signal(signal.SIGTERM)
        assert job.wait(30) == PREEMPTED


@pytest.mark.parametrize("flags", [(), ("--preempt_grace=20",)])
def test_ctrl_c_and_jobs_without_the_flag_end_at_once(flags: tuple[str, ...], tmp_path: Path) -> None:
    script = "import os, time\nprint(f'three {os.getpid()}', flush=True)\ntime.sleep(100)\n"
    with Launcher(tmp_path, script, *flags) as job:
        pid = int(job.wait_for(r"three (\d+)")[1])
        number = signal.SIGINT if flags else signal.SIGTERM
        job.signal(number)
        assert job.wait(20) == 128 + number
        assert wait_until_gone([pid], 1.0) == []


def test_the_calls_do_nothing_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)
    with pytest.raises(NotInitializedError, match="heartbeat"):
        fleet.heartbeat()
    fleet.init(is_collective=True, log_level="ERROR")
    fleet.heartbeat()
    fleet.heartbeat(pause=True)
    assert not fleet.preempted()
