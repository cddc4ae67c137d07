"""Checkpoints of which every worker writes and reads its own part."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.checkpoint.items import SavedTensors
from fleet.checkpoint.loading import load
from fleet.checkpoint.writer import own_writer
from fleet.elastic.folder import hooks
from fleet.errors import CheckpointError, ConfigError
from tests.fleet.elastic.training import Training
from tests.helpers.fleets import own_fleet
from tests.helpers.sources import ROOT
from tests.helpers.workers import run_workers

STAGE3 = {"sharding": True, "sharding_configs": {"stage": 3, "sharding_degree": 2}}
EP2 = {"ep": 2, "sharding": 2}
MB = 1 << 20


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def formats(folder: Path) -> dict[str, str]:
    """The checkpoints in a folder, and the file that makes each complete."""
    found = {}
    for path in sorted(folder.glob("step-*")):
        names = {file.name for file in path.iterdir()} & {"index.json"}
        found[path.name.lstrip("step-0")] = " ".join(names)
    return found


def big(folder: str, options: dict[str, Any]) -> Any:
    """Model, optimizer and checkpoint of 16 MB of parameters and 16 MB of momentum, after one step."""
    strategy = fleet.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.Linear(2048, 1024))
    model = fleet.distributed_model(net)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9))
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()
    return model, optimizer, fleet.elastic.Checkpoint(folder, model, optimizer)


def save_big(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> Any:
    model, optimizer, checkpoint = big(folder, options)
    checkpoint.save()
    return model.full_state_dict(), optimizer.full_state_dict()["state"]


def load_big(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> Any:
    """Returns the whole state that is resumed, and how many bytes this worker has read."""
    model, optimizer, checkpoint = big(folder, options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sources: list[SavedTensors] = []
    close = SavedTensors.close

    def noted(self: SavedTensors) -> None:
        sources.append(self)
        close(self)

    SavedTensors.close = noted  # type: ignore[method-assign]
    assert checkpoint.resume()
    return model.full_state_dict(), optimizer.full_state_dict()["state"], [source.num_read for source in sources]


def test_a_worker_of_another_mesh_reads_its_own_bytes_alone(tmp_path: Path) -> None:
    """Half of 32 MB on each of two workers, in blocks of 1 MB; one worker of the same job writes 32 MB."""
    ((model, state),) = run_workers(save_big, 1, str(tmp_path), {}, backend=None)
    for found, again, read in run_workers(load_big, 2, str(tmp_path), STAGE3, backend=None):
        assert all(torch.equal(found[name], model[name]) for name in model)
        assert all(torch.equal(again[place]["momentum_buffer"], state[place]["momentum_buffer"]) for place in state)
        assert len(read) == 1
        assert 16 * MB <= read[0] <= (16 + 6) * MB  # the first and last block of each of four matrices, and the rest
    sizes = [path.stat().st_size for path in tmp_path.glob("step-*/data-*")]
    assert len(sizes) == 1
    assert 32 * MB < sizes[0] < 33 * MB


def save_twice(rank: int, world_size: int, folder: str) -> None:
    training = Training(folder, STAGE3)
    training.run(1, stop_at=1)
    training.run(1, stop_at=2)


def resume_damaged(rank: int, world_size: int, folder: str) -> tuple[int, str]:
    training = Training(folder, STAGE3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert training.checkpoint.resume()
    return training.checkpoint.step, " ".join(f"{one.message}" for one in said)


def test_a_damaged_block_of_one_worker_makes_all_take_the_checkpoint_before(tmp_path: Path) -> None:
    """Worker 0 does not read that file; without an agreement it would go on from another step."""
    run_workers(save_twice, 2, str(tmp_path), backend=None)
    (path,) = (tmp_path / "step-0000000002").glob("data-*-00001.safetensors")
    data = path.read_bytes()
    path.write_bytes(data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])
    (step, said), (other, _) = run_workers(resume_damaged, 2, str(tmp_path), backend=None)
    assert (step, other) == (1, 1)
    assert "step-0000000002" in said
    assert "-00001.safetensors: bytes 0 to" in said
    assert "(worker 1)" in said


def resume_on_one_disk(rank: int, world_size: int, folder: str) -> tuple[bool, list[torch.Tensor]]:
    training = Training(folder if rank == 0 else f"{folder}/of worker {rank}")
    resumed = training.checkpoint.resume()
    return resumed, training.numbers()[:-1]


def save_alone(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    return Training(folder).run(1, stop_at=2).numbers()[:-1]


def test_workers_that_do_not_see_the_folder_get_the_state_from_worker_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker has written its share, which is everything; then there are two, on machines of their own."""
    (wanted,) = run_workers(save_alone, 1, str(tmp_path), backend=None)
    found = run_workers(resume_on_one_disk, 2, str(tmp_path), backend=None)
    assert formats(tmp_path) == {"2": "index.json"}
    for resumed, numbers in found:
        assert resumed
        assert equal(numbers, wanted)


def resume_experts_on_one_disk(rank: int, world_size: int, folder: str) -> str:
    try:
        with_experts(rank, world_size, folder if rank == 0 else f"{folder}/of worker {rank}", EP2, False)
    except ConfigError as error:
        return f"{error}"
    return ""


def test_a_folder_that_some_worker_does_not_see_is_refused_with_experts(tmp_path: Path) -> None:
    """On every worker: none goes on from the beginning."""
    run_workers(with_experts, 2, str(tmp_path), EP2, True, backend=None)
    for said in run_workers(resume_experts_on_one_disk, 2, str(tmp_path), backend=None):
        assert "not every worker sees it" in said
        assert "Name a folder that all of them share" in said


class Expert(torch.nn.Module):
    """A layer that workers along ep hold under different names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 4), torch.nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.down(torch.relu(self.up(x)))
        return answer


def with_experts(rank: int, world_size: int, folder: str, degrees: dict[str, int], saves: bool) -> Any:
    """Saves, or resumes, a model with four experts; returns the whole states."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": size for axis, size in degrees.items()}
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(1 if saves else 2)
    experts = [Expert() for _ in range(4 // degrees.get("ep", 1))]
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), fleet.moe.MoELayer(8, experts, gate={"type": "naive", "top_k": 1}))
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), lr=0.01))
    model = fleet.distributed_model(net)
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    optimizer.step()
    checkpoint = fleet.elastic.Checkpoint(folder, model, optimizer)
    if saves:
        checkpoint.save()
    else:
        assert checkpoint.resume()
    return model.full_state_dict(), optimizer.full_state_dict()["state"]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
def test_experts_go_on_on_another_mesh(before: int, after: int, tmp_path: Path) -> None:
    """Each worker knows the names of its own experts; the groups of the optimizer have those of all."""
    meshes: dict[int, dict[str, int]] = {1: {}, 2: EP2}
    one, state = run_workers(with_experts, before, str(tmp_path), meshes[before], True, backend=None)[0]
    for two, again in run_workers(with_experts, after, str(tmp_path), meshes[after], False, backend=None):
        assert {name: value.tolist() for name, value in two.items()} == {n: value.tolist() for n, value in one.items()}
        assert all(torch.equal(v, again[place][key]) for place, entry in state.items() for key, v in entry.items())


@pytest.mark.usefixtures("alone")
def test_an_asynchronous_writer_that_is_killed_is_an_error_of_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_FAULTS", "save.part:stop:step=2")
    training = Training(tmp_path, asynchronous=True).run(1, stop_at=1)
    training.run(1, stop_at=2)
    process = own_writer()._process
    assert process is not None
    deadline = time.monotonic() + 20
    while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(CheckpointError, match="step-0000000002' was not written: .* was killed by signal 9"):
        training.step(torch.ones(2))
    training.run(1, stop_at=4)
    training.checkpoint.close()
    assert formats(tmp_path) == {"1": "index.json", "4": "index.json"}


def save_while_a_writer_dies(rank: int, world_size: int, folder: str) -> str:
    """Kills the writer of worker 1 in the middle of a save; returns what the next save says."""
    training = Training(folder, asynchronous=True)
    training.run(1, stop_at=1)
    process = own_writer()._process
    assert process is not None
    if rank == 1:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    said = ""
    try:
        training.checkpoint.save()
    except CheckpointError as error:
        said = f"{error}"
    training.step(torch.ones(2))
    training.checkpoint.save()
    training.checkpoint.close()
    return said


def test_a_writer_that_dies_on_one_worker_is_heard_of_by_all(tmp_path: Path) -> None:
    """Worker 0 waits for a record that would never come."""
    faults = {"FLEET_FAULTS": "save.part:stop:step=1:rank=1:count=1"}
    for said in run_workers(save_while_a_writer_dies, 2, str(tmp_path), backend=None, environment=faults):
        assert "the previous checkpoint was not written" in said
        assert "was killed by signal 9" in said
    assert list(formats(tmp_path).values()) == ["index.json"]


def test_the_process_that_writes_needs_no_torch() -> None:
    """It starts in a tenth of a second, and takes no memory but the copy."""
    program = "import sys, fleet.elastic.folder; print({'torch', 'numpy'} & {*sys.modules})"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout == "set()\n"


def test_a_fault_of_the_process_that_writes_counts_over_its_saves(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"faults": "save.part:raise:count=2", "rank": 1, "generation": 0, "trainer": 0}
    for number in range(3):
        meet, after = hooks(**arguments, path=f"{tmp_path}/step-000000000{number}", step=number, keep=1)
        if number == 1:
            with pytest.raises(OSError, match="No space left"):
                meet("save.part")
        else:
            meet("save.part")
        after()  # worker 1 removes nothing


@pytest.mark.usefixtures("alone")
def test_a_damaged_index_is_named_once_and_stays(tmp_path: Path) -> None:
    wanted = Training(tmp_path).run(1, stop_at=3).numbers()
    again = Training(tmp_path, keep=2)
    assert again.checkpoint.resume()
    assert equal(again.numbers(), wanted)
    again.run(1, stop_at=5)
    (tmp_path / "step-0000000005" / "index.json").write_text("{}")
    third = Training(tmp_path, keep=1)
    path = re.escape(str(tmp_path))
    told = rf"resume\(\): {path}/step-0000000005/index\.json is damaged .*[^.]\. It is skipped"
    with pytest.warns(UserWarning, match=told):
        assert third.checkpoint.resume()
    assert equal(third.numbers(), wanted)
    third.run(1, stop_at=4)
    assert formats(tmp_path) == {"4": "index.json", "5": "index.json"}  # what is damaged stays for inspection


@pytest.mark.usefixtures("alone")
def test_what_a_dead_save_has_left_is_passed_over_and_removed(tmp_path: Path) -> None:
    Training(tmp_path).run(1, stop_at=2)
    left = tmp_path / "step-0000000003"
    left.mkdir()
    (left / "data-0a1b2c-00000.safetensors").write_bytes(b"begun")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Training(tmp_path)
        assert again.checkpoint.resume()
    assert again.checkpoint.step == 2
    again.run(1, stop_at=3)
    assert formats(tmp_path) == {"2": "index.json", "3": "index.json"}


@pytest.mark.usefixtures("alone")
def test_it_is_a_checkpoint_of_fleet_checkpoint(tmp_path: Path) -> None:
    """A program without Checkpoint loads it, and the position of the scheduler with it."""
    training = Training(tmp_path).run(1, stop_at=5)
    wanted = training.numbers()[:-1]
    other = Training(tmp_path / "unused")
    objects = {"model": other.model, "optimizer": other.optimizer, "scheduler": other.scheduler}
    load(tmp_path / "step-0000000005", objects)
    assert equal(other.numbers()[:-1], wanted)
    assert other.scheduler.last_epoch == 5
    assert load(tmp_path / "step-0000000005")["run"]["step"] == 5


@pytest.mark.usefixtures("alone")
def test_what_no_file_can_hold_is_refused(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.checkpoint.extra["when"] = object()
    with pytest.raises((CheckpointError, ConfigError), match=r"run/extra/when.*a file without code cannot hold"):
        training.checkpoint.save()
    assert formats(tmp_path) == {}
    del training.checkpoint.extra["when"]
    training.checkpoint.save()
    assert list(formats(tmp_path).values()) == ["index.json"]
