"""save and load: whole files only, no code from a file."""

from __future__ import annotations

import multiprocessing
import os
import random
import stat
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fleet.checkpoint import save_load
from fleet.checkpoint.save_load import known_entries, load, save
from fleet.errors import CheckpointError, ConfigError


def state(value: float = 1.0) -> dict[str, Any]:
    """Returns what a script saves."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.full((1, 3), value)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 3, "best": None, "name": "x"}


def same(first: Any, second: Any) -> bool:
    """Returns whether two states are equal, tensors bit by bit."""
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return bool(first == second)


@pytest.mark.parametrize("name", ["model.pdparams", "model", "a.b/c.pdopt", "weird [x]*?.pt"])
def test_the_file_has_exactly_the_given_name(tmp_path: Path, name: str) -> None:
    """003-30: no suffix is added."""
    saved = state()
    save(saved, str(tmp_path / name))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [Path(name).name]
    assert same(load(tmp_path / name), saved)


def test_an_ordered_dict_and_scheduler_state_come_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    saved = OrderedDict(model=model.state_dict(), scheduler=scheduler.state_dict(), rng=torch.get_rng_state())
    save(saved, tmp_path / "x")
    assert same(load(tmp_path / "x"), saved)
    assert isinstance(load(tmp_path / "x"), OrderedDict)


def test_a_file_is_replaced_with_ordinary_rights(tmp_path: Path) -> None:
    path, plain = tmp_path / "x", tmp_path / "plain"
    save({"epoch": 1}, path)
    save({"epoch": 2}, path)
    plain.write_text("")
    assert load(path) == {"epoch": 2}
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["plain", "x"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    save(1, tmp_path / "real")
    (tmp_path / "latest").symlink_to("real")
    save(2, tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert load(tmp_path / "real") == 2


class Payload:
    """Runs a command when it is unpickled by a reader that believes everything."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.marker,)


def test_a_crafted_file_runs_nothing(tmp_path: Path) -> None:
    """Security promise: reading a checkpoint cannot run code."""
    marker = tmp_path / "ran"
    torch.save({"model": Payload(str(marker))}, tmp_path / "evil")
    with pytest.raises(CheckpointError, match="plain data|run code"):
        load(tmp_path / "evil")
    assert not marker.exists()
    torch.load(tmp_path / "evil", weights_only=False)
    assert marker.exists(), "the payload works; it is load() that stops it"


@pytest.mark.parametrize("obj", [nn.Linear(1, 1), {"opt": Payload("never")}, {"f": lambda: 1}, {"e": ConfigError("x")}])
def test_what_could_not_be_read_is_not_written(tmp_path: Path, obj: Any) -> None:
    save({"epoch": 1}, tmp_path / "x")
    with pytest.raises(ConfigError, match=r"state_dict\(\)"):
        save(obj, tmp_path / "x")
    assert load(tmp_path / "x") == {"epoch": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["x"]


def test_the_refusal_names_the_class(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch\.nn\.modules\.linear\.Linear"):
        save({"model": nn.Linear(1, 1)}, tmp_path / "x")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.99])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, share: float) -> None:
    path = tmp_path / "x.pdparams"
    save(state(), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"x\.pdparams.*(truncated or damaged|plain data)"):
        load(path)


def test_damaged_tensor_data_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save({"weight": torch.full((1000,), 1.5)}, path)
    data = path.read_bytes()
    place = data.index(torch.full((8,), 1.5).numpy().tobytes()) + 400
    path.write_bytes(data[:place] + b"\0\0\0\0" + data[place + 4 :])
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
    assert not torch.equal(load(path, check_sums=False)["weight"], torch.full((1000,), 1.5))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("epoch: 3\n" * 100)
    with pytest.raises(CheckpointError, match="text"):
        load(tmp_path / "text")
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="folder"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="folder"):
        save(1, tmp_path)
    assert issubclass(CheckpointError, OSError)


@pytest.mark.parametrize("path", ["", 3, None])
def test_a_path_is_a_name(path: Any) -> None:
    with pytest.raises(ConfigError, match="path="):
        save(1, path)
    with pytest.raises(ConfigError, match="path="):
        load(path)


def test_an_error_of_the_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"epoch": 1}, tmp_path / "x")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_load.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save({"epoch": 2}, tmp_path / "x")
    monkeypatch.undo()
    assert load(tmp_path / "x") == {"epoch": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["x"]


def test_a_full_device_is_reported() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(CheckpointError, match="No space|Not a directory|denied|previous file"):
        save(1, "/dev/full/x")


def test_leftovers_of_a_killed_process_go_away(tmp_path: Path) -> None:
    old, new = tmp_path / ".x.0123.tmp", tmp_path / ".x.4567.tmp"
    old.write_text("")
    new.write_text("")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    save(1, tmp_path / "x")
    assert sorted(item.name for item in tmp_path.iterdir()) == [".x.4567.tmp", "x"]


def _save_for_ever(path: str, ready: Any) -> None:
    torch.set_num_threads(1)
    for epoch in range(1, 10**6):
        save({"epoch": epoch, "weight": torch.full((200_000,), float(epoch))}, path)
        ready.set()


def kill_in_mid_save(path: Path, seed: int) -> None:
    """Kills a process that saves without pause, and checks that the file is whole."""
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=_save_for_ever, args=(str(path), ready), daemon=True)
    process.start()
    try:
        assert ready.wait(30)
        time.sleep(random.Random(seed).uniform(0.0, 0.05))
    finally:
        process.kill()
        process.join(10)
        process.close()
    found = load(path)
    assert torch.equal(found["weight"], torch.full((200_000,), float(found["epoch"])))


@pytest.mark.parametrize("seed", range(3))
def test_a_kill_in_mid_save_leaves_a_whole_file(tmp_path: Path, seed: int) -> None:
    kill_in_mid_save(tmp_path / "x", seed)


@pytest.mark.slow
def test_twenty_kills_leave_a_whole_file_each(tmp_path: Path) -> None:
    leftovers = 0
    for seed in range(20):
        kill_in_mid_save(tmp_path / "x", seed)
        leftovers += len(list(tmp_path.glob(".x.*.tmp")))
        assert (tmp_path / "x").is_file()
    assert leftovers > 0, "no kill came in mid-save; the test proves nothing"


def test_entries_that_are_no_parameters_are_left_alone() -> None:
    """004-08: state_dict['epoch'] = n beside the parameters."""
    model = nn.Linear(2, 1)
    saved = {**model.state_dict(), "epoch": 3, "note": "x", "history": [1, 2]}
    kept = known_entries(saved, model.state_dict())
    assert kept.keys() == model.state_dict().keys()
    model.load_state_dict(kept)  # strict
    with pytest.raises(RuntimeError, match="epoch"):
        model.load_state_dict(saved)


def test_a_tensor_nobody_knows_is_a_mistake() -> None:
    saved = {**nn.Linear(2, 1).state_dict(), "other.weight": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"other\.weight"):
        known_entries(saved, ["weight", "bias"])


def test_a_model_that_paddle_wrote_is_named(tmp_path: Path) -> None:
    """003-09: worker 0 of a 1.x script loads the folder, or the program in it, to predict."""
    (tmp_path / "__model__").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "__model__"):
        with pytest.raises(CheckpointError, match="holds a model that Paddle wrote .* give them to load_state_dict"):
            load(str(path))
    with pytest.raises(CheckpointError, match=r"there is no such file\.$"):
        load(str(tmp_path / "absent"))
