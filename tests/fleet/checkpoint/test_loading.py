"""load: every mesh reads what every mesh wrote, bit for bit, and training goes on as it would have."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet import checkpoint, fleet
from fleet.errors import CheckpointError, ConfigError, FleetError
from tests.fleet.checkpoint.matrix import (
    MESHES,
    MIXTURES,
    RESNETS,
    SEQUENCES,
    differences,
    load_on,
    save_on,
    train_resnet,
)
from tests.helpers.sampled import sampled
from tests.helpers.workers import run_workers

QUICK = [
    ("dp2", "mp2"),
    ("mp2", "pp2"),
    ("pp2", "stage3"),
    ("stage3", "sharding2"),
    ("sharding2", "one"),
    ("one", "dp2"),
]


def check(tmp_path: Path, saved: str, loaded: list[str], rule: str) -> None:
    """Raises AssertionError unless each mesh goes on bit-equal from what ``saved`` wrote."""
    meshes = MESHES | MIXTURES | SEQUENCES
    one = meshes[saved]
    path = f"{tmp_path / saved}"
    expected = run_workers(save_on, one.world_size, one, rule, path, True, backend=None, timeout_s=240)[0]
    whole = checkpoint.load(path)
    for name in loaded:
        mesh, again = meshes[name], f"{tmp_path / saved}-{name}"
        found = run_workers(load_on, mesh.world_size, mesh, rule, path, again, backend=None, timeout_s=240)
        assert not list(differences(whole, checkpoint.load(again))), f"{saved} to {name}"
        for losses in found:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("saved", "loaded"), QUICK)
def test_a_mesh_goes_on_from_another_ones_checkpoint(tmp_path: Path, saved: str, loaded: str) -> None:
    check(tmp_path, saved, [loaded], "adamw")


@pytest.mark.parametrize("saved", sampled(list(MESHES)))
def test_every_mesh_loads_what_every_mesh_saved(tmp_path: Path, saved: str) -> None:
    check(tmp_path, saved, list(MESHES), "adamw")


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["sharding2", "mp2", "pp2"])
def test_muon_goes_on_from_mesh_to_mesh(tmp_path: Path, saved: str) -> None:
    check(tmp_path, saved, list(dict.fromkeys([saved, "one", "dp2", "mp2", "sharding2"])), "muon")


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["experts", "ep2"])
def test_experts_go_on_from_mesh_to_mesh(tmp_path: Path, saved: str) -> None:
    check(tmp_path, saved, list(MIXTURES), "steady")


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["sep2"])
def test_divided_sequences_go_on_from_mesh_to_mesh(tmp_path: Path, saved: str) -> None:
    check(tmp_path, saved, list(SEQUENCES), "steady")


def _load_alone(rank: int, world_size: int, path: str) -> str:
    fleet.init(is_collective=True)
    model = fleet.distributed_model(nn.Linear(3, 2))
    fleet.checkpoint.save(path, {"model": model})
    before = model.module.weight.detach().clone()
    try:
        if rank == 0:
            fleet.checkpoint.load(path, {"model": model})
        else:
            fleet.barrier_worker()
    except FleetError as error:
        assert torch.equal(model.module.weight, before)
        return f"{type(error).__name__}: {error}"
    return ""


def test_one_worker_cannot_load_into_a_model_alone(tmp_path: Path) -> None:
    environment = {"FLEET_WAIT_LIMIT": "1"}
    found = run_workers(_load_alone, 2, f"{tmp_path}", backend=None, environment=environment)
    assert "the workers make different calls where all must make the same" in found[0]
    assert "fleet.checkpoint.load()" in found[0]


def check_resnet(tmp_path: Path, saved: str, loaded: list[str]) -> None:
    """Raises AssertionError unless a ResNet goes on bit-equal on each mesh from what ``saved`` wrote."""
    one, path = RESNETS[saved], f"{tmp_path / saved}"
    expected = run_workers(train_resnet, one.world_size, one, path, "", backend=None, timeout_s=240)[0]
    whole = checkpoint.load(path)
    for name in loaded:
        mesh, again = RESNETS[name], f"{tmp_path / saved}-{name}"
        found = run_workers(train_resnet, mesh.world_size, mesh, path, again, backend=None, timeout_s=240)[0]
        assert not list(differences(whole, checkpoint.load(again))), f"{saved} to {name}"
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0, atol=1e-6)


def test_a_resnet_goes_on_from_another_mesh(tmp_path: Path) -> None:
    check_resnet(tmp_path, "stage3", ["dp2"])


@pytest.mark.parametrize("saved", sampled(list(RESNETS)))
def test_a_resnet_goes_on_from_every_mesh_on_every_mesh(tmp_path: Path, saved: str) -> None:
    check_resnet(tmp_path, saved, list(RESNETS))


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere' is no checkpoint: it is absent or empty"):
        checkpoint.load(tmp_path / "nowhere")
    (tmp_path / "file.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"file.pt' is a file. Name the folder"):
        checkpoint.load(tmp_path / "file.pt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").write_text("")
    with pytest.raises(CheckpointError, match=r"holds no index.json, only \['x'\]"):
        checkpoint.load(tmp_path / "other")
    with pytest.raises(ConfigError, match="path=None"):
        checkpoint.load(None)  # type: ignore[arg-type]


def damaged(path: Path) -> list[Path]:
    """Returns the files of a checkpoint of one layer."""
    torch.manual_seed(0)
    checkpoint.save(path, {"model": nn.Linear(300, 300)})
    return sorted(path.iterdir())


def test_every_damage_is_found_before_anything_is_changed(tmp_path: Path) -> None:
    data, index = damaged(tmp_path)
    model = nn.Linear(300, 300)
    before = model.weight.detach().clone()
    whole, text = data.read_bytes(), index.read_text()

    def refused(match: str) -> None:
        with pytest.raises(CheckpointError, match=match):
            checkpoint.load(tmp_path, {"model": model})
        data.write_bytes(whole)
        index.write_text(text)

    data.write_bytes(whole[:-1])
    refused("has 361[0-9]+ bytes; 361[0-9]+ were written")
    data.unlink()
    refused("No such file")
    index.write_text(text.replace('"float32"', '"float16"', 1))
    refused("does not match its SHA-256")
    index.write_text(text[:-20])
    refused("is damaged")
    data.write_bytes(whole[:5000] + bytes([whole[5000] ^ 4]) + whole[5001:])
    refused("do not match their sum")
    assert torch.equal(before, model.weight)


def test_a_checkpoint_loads_without_sums(tmp_path: Path) -> None:
    damaged(tmp_path)
    model = nn.Linear(300, 300)
    checkpoint.load(tmp_path, {"model": model}, check_sums=False)
    assert torch.equal(model.weight, checkpoint.load(tmp_path)["model"]["weight"])


def test_a_damaged_block_changes_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(4)])  # 2.6 MB, the last block is damaged
    checkpoint.save(tmp_path, {"model": model})
    (name,) = glob.glob(f"{tmp_path}/data-*")
    with open(name, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01\x02\x03\x04")
    before = [parameter.detach().zero_().clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError, match="do not match their sum"):
        checkpoint.load(tmp_path, {"model": model})
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def said_by(call: Any) -> str:
    """Returns the error of a call."""
    try:
        call()
    except FleetError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def load_together(rank: int, world_size: int, path: str) -> list[Any]:
    """Loads at once what was saved asynchronously, and then what only one worker can load, or loads."""
    fleet.init(is_collective=True)
    model = fleet.distributed_model(nn.Linear(2, 2))
    found: list[Any] = []
    for number in range(8):
        with torch.no_grad():
            model.module.weight.fill_(number)
        fleet.checkpoint.save(path, {"model": model}, asynchronous=True)
        with torch.no_grad():
            model.module.weight.fill_(-1)
        fleet.checkpoint.load(path, {"model": model})
        found.append(float(model.module.weight.sum()))
    with torch.no_grad():
        model.module.weight.fill_(-1)
    other = model if rank == 0 else nn.Linear(3, 2)
    found.append(said_by(lambda: fleet.checkpoint.load(path, {"model": other})))
    fleet.checkpoint.save(f"{path}-b", {"model": model, "epoch": 1})
    found.append(said_by(lambda: fleet.checkpoint.load(f"{path}-b" if rank else path, {"model": model})))
    given: Any = {"model": model, **({"epoch": 0} if rank else {})}
    found.append(said_by(lambda: fleet.checkpoint.load(f"{path}-b", given)))
    if rank == 0:
        found.append(said_by(lambda: fleet.checkpoint.load(path, {"model": model})))
    else:
        found.append(said_by(fleet.barrier_worker))
    return [*found, float(model.module.weight.sum())]


def test_all_workers_load_the_same_or_none(tmp_path: Path) -> None:
    for losses in run_workers(load_together, 2, f"{tmp_path / 'run'}", backend=None):
        *numbers, misfit, paths, keys, alone, kept = losses
        assert numbers == [4.0 * number for number in range(8)]
        assert "CheckpointError: fleet.checkpoint.load(): worker 1: " in misfit
        assert "of another shape: 'model/weight' is [2, 2] in the checkpoint and [2, 3] here" in misfit
        assert "ConfigError: fleet.checkpoint.load(): the workers are at different places: path by rank" in paths
        assert "the workers name different objects: [['model'], ['epoch', 'model']]" in keys
        assert "the workers make different calls where all must make the same" in alone
        assert "fleet.checkpoint.load()" in alone
        assert kept == -4.0
