"""Checkpoint: a resumed training is the one that was not interrupted; what is not whole is never loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fleet
from fleet.checkpoint.commit import read_index
from fleet.checkpoint.storage import LocalFolder
from fleet.elastic.places import has_own_states
from fleet.errors import CheckpointError, ConfigError
from tests.fleet.elastic.training import Training
from tests.helpers.fleets import own_fleet
from tests.helpers.workers import run_workers


@pytest.fixture(autouse=True)
def _own_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    own_fleet(monkeypatch)


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def saved(folder: Path) -> list[str]:
    """The names in a folder of checkpoints, leftovers included."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stop_at", [1, 5, 12, 17])
def test_a_resumed_training_is_the_one_that_was_not_interrupted(
    stop_at: int, asynchronous: bool, tmp_path: Path
) -> None:
    """004-05: parameters, momentum, learning rate, dropout and the order of the samples, to the bit."""
    whole = Training(tmp_path / "whole").run(2)
    wanted = whole.numbers()
    first = Training(tmp_path / "cut", asynchronous=asynchronous).run(2, stop_at)
    first.checkpoint.close()
    torch.manual_seed(99)
    again = Training(tmp_path / "cut")
    assert again.checkpoint.resume()
    assert again.checkpoint.step == stop_at
    again.run(2)
    assert first.seen + again.seen == whole.seen
    assert equal(again.numbers(), wanted)


def test_the_state_that_is_written_is_that_of_the_call(tmp_path: Path) -> None:
    """An asynchronous write must not see the steps that follow."""
    training = Training(tmp_path, asynchronous=True)
    training.run(1, stop_at=3)
    wanted = training.numbers()
    for _ in range(20):
        training.step(torch.ones(2))
    training.checkpoint.close()
    again = Training(tmp_path)
    assert again.checkpoint.resume()
    assert equal(again.numbers(), wanted)


def spoil(path: Path, how: str) -> None:
    """Damages a checkpoint."""
    target = path / "index.json" if "index" in how else next(path.glob("data-*"))
    data = target.read_bytes()
    if how == "cut":
        target.write_bytes(data[:-10])
    elif how == "flipped":
        target.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    elif how == "missing":
        target.unlink()
    elif how == "index is no JSON":
        target.write_bytes(data[:50])
    elif how == "index changed":
        target.write_text(target.read_text().replace('"step": 7', '"step": 8'))
    elif how == "link":
        copy = path.parent / "elsewhere"
        target.rename(copy)
        target.symlink_to(copy)
    elif how == "a pipe as index":
        target.unlink()
        os.mkfifo(target)
    elif how == "folder is a link":
        copy = path.parent / "elsewhere"
        path.rename(copy)
        path.symlink_to(copy)
    else:
        content = json.loads(data)
        content["version"] = 99
        content.pop("sha256")
        from fleet.checkpoint.index import _sum_of as sum_of

        target.write_text(json.dumps({**content, "sha256": sum_of(content)}))


LINKS = ["link", "a pipe as index", "folder is a link"]
DAMAGE = ["cut", "flipped", "missing", *LINKS, "index is no JSON", "index changed", "index of a later version"]


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(how: str, tmp_path: Path) -> None:
    """004-08 and the promise: load falls back to the newest whole one."""
    training = Training(tmp_path)
    training.run(1, stop_at=4)
    wanted = training.numbers()
    training.run(1, stop_at=7)
    spoil(tmp_path / "step-0000000007", how)
    again = Training(tmp_path)
    with pytest.warns(UserWarning, match="step-0000000007"):
        assert again.checkpoint.resume()
    assert again.checkpoint.step == 4
    assert equal(again.numbers(), wanted)


def test_nothing_whole_means_a_new_beginning(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.run(1, stop_at=4)
    spoil(tmp_path / "step-0000000004", "cut")
    again = Training(tmp_path, epoch=2)
    with pytest.warns(UserWarning, match=r"data-\S+ has \d+ bytes; \d+ were written"):
        assert not again.checkpoint.resume()
    assert (again.checkpoint.epoch, again.checkpoint.step) == (2, 0)


def test_only_the_newest_stay_and_leftovers_go(tmp_path: Path) -> None:
    (tmp_path / ".step-0000000009.trash").mkdir()
    (tmp_path / "my notes").write_text("stay")
    training = Training(tmp_path, keep=2, every=3).run(1)
    assert saved(tmp_path) == ["my notes", "step-0000000009", "step-0000000012"]
    training.checkpoint.save()
    assert saved(tmp_path) == ["my notes", "step-0000000012", "step-0000000012.1"]


def test_a_damaged_later_checkpoint_does_not_push_out_what_is_written_after_it(tmp_path: Path) -> None:
    """004-08: its length is right, so only its sum tells; with it counted, keep=1 removed every new checkpoint."""
    Training(tmp_path, keep=1).run(1, stop_at=7)
    spoil(tmp_path / "step-0000000007", "flipped")
    again = Training(tmp_path, keep=1, every=1)
    with pytest.warns(UserWarning, match="step-0000000007"):
        assert not again.checkpoint.resume()
    again.run(1, stop_at=3)
    assert saved(tmp_path) == ["step-0000000003", "step-0000000007"]


def test_a_new_training_in_the_folder_of_another_is_refused(tmp_path: Path) -> None:
    """Its checkpoints would be older than those that are there, so they would be removed, or never loaded."""
    Training(tmp_path).run(1, stop_at=7)
    with pytest.raises(ConfigError, match=r"holds step-0000000007 of an earlier run, and resume\(\) was not called"):
        Training(tmp_path).run(1, stop_at=2)
    assert saved(tmp_path) == ["step-0000000007"]


def test_two_checkpoints_of_one_program_do_not_save_in_one_folder(tmp_path: Path) -> None:
    """Each would remove the other's; to load what the other has saved, and to go on from there, is no mistake."""
    training = Training(tmp_path)
    other = fleet.elastic.Checkpoint(f"{tmp_path}/.", training.model)
    training.checkpoint.save()
    with pytest.raises(ConfigError, match="another Checkpoint in this program has saved to .* since"):
        other.save()
    assert other.resume()
    training.step(torch.ones(2))
    training.checkpoint.save()
    assert other.resume()
    training.step(torch.ones(2))
    other.save()
    with pytest.raises(ConfigError, match=r"Give each a folder, or call resume\(\)"):
        training.checkpoint.save()


@pytest.mark.parametrize("role", ["optimizer", "scheduler"])
def test_the_state_of_another_class_is_refused(role: str, tmp_path: Path) -> None:
    """StepLR's entries in a OneCycleLR would change nothing but its counters; Adam cannot go on from SGD."""
    Training(tmp_path).run(1, stop_at=2)
    again = Training(tmp_path / "other")
    optimizer = torch.optim.Adam(again.model.parameters()) if role == "optimizer" else again.optimizer
    scheduler = torch.optim.lr_scheduler.ExponentialLR(again.optimizer, 0.9)
    checkpoint = fleet.elastic.Checkpoint(tmp_path, again.model, optimizer, scheduler if role == "scheduler" else None)
    before = again.numbers()
    saved_with = {"optimizer": "SGD, and this job has Adam", "scheduler": "MultiStepLR, and this job has ExponentialLR"}
    with pytest.raises(CheckpointError, match=f"was saved with the {role} {saved_with[role]}"):
        checkpoint.resume()
    assert equal(again.numbers(), before)


def test_none_is_written_in_the_loop_of_an_evaluation(tmp_path: Path) -> None:
    """A resumed training would begin the evaluation again, and draw its random numbers twice."""
    training = Training(tmp_path, every=1)
    training.step(torch.ones(2))
    sampler = fleet.elastic.ElasticSampler(range(4))
    assert len(list(sampler.batches(torch.utils.data.DataLoader(range(4), sampler=sampler)))) == 4
    assert not list(tmp_path.iterdir())
    next(training.sampler.batches(training.loader))
    assert saved(tmp_path) == ["step-0000000001"]


def test_samples_recorded_by_hand_are_refused_beside_every(tmp_path: Path) -> None:
    """Where the record comes before the step, a checkpoint at the next forward leaves out that batch."""
    training = Training(tmp_path, every=2)
    for batch in training.loader:
        with pytest.raises(
            ConfigError, match=r"Checkpoint\(every=2\).*or omit every and call checkpoint.save\(\) after"
        ):
            training.sampler.record(len(batch))
        break
    assert training.sampler.done == 0
    training.checkpoint.close()
    training.sampler.record(2)  # nothing saves by itself any longer
    by_hand = Training(tmp_path / "by hand")
    for batch in by_hand.loader:
        by_hand.step(batch)
        by_hand.sampler.record(len(batch))
    by_hand.checkpoint.save()
    assert by_hand.sampler.done == len(by_hand.seen)


def test_several_models_in_one_checkpoint(tmp_path: Path) -> None:
    """A model and its moving average, the model as distributed_model returned it."""
    training = Training(tmp_path / "unused")
    both = torch.nn.ModuleDict({"net": training.model, "mean": torch.optim.swa_utils.AveragedModel(training.model)})
    checkpoint = fleet.elastic.Checkpoint(tmp_path / "both", both, training.optimizer)
    training.step(torch.ones(2))
    checkpoint.save(epoch=1)
    wanted = {name: value.clone() for name, value in both.state_dict().items()}
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.zero_()
    assert checkpoint.resume()
    assert all(torch.equal(value, wanted[name]) for name, value in both.state_dict().items())


def test_the_newest_of_one_step_is_the_last_one(tmp_path: Path) -> None:
    training = Training(tmp_path).run(1, stop_at=2)
    training.checkpoint.extra["best"] = 0.75
    training.checkpoint.save(epoch=4)
    again = Training(tmp_path)
    assert again.checkpoint.resume()
    assert (again.checkpoint.epoch, again.checkpoint.extra) == (4, {"best": 0.75})


@pytest.mark.parametrize("point", ["save.block", "save.manifest", "save.rename"])
def test_a_full_disk_is_an_error_and_leaves_what_was_there(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_FAULTS", f"{point}:raise:step=5")
    training = Training(tmp_path).run(1, stop_at=2)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*No space left"):
        training.run(1, stop_at=5)
    assert saved(tmp_path) == ["step-0000000002"]


def test_an_error_of_the_thread_comes_with_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_FAULTS", "save.part:raise:step=2;save.part:raise:step=3")
    training = Training(tmp_path, asynchronous=True)
    training.run(1, stop_at=2)
    with pytest.raises(CheckpointError, match="the previous checkpoint was not written.*No space left"):
        training.run(1, stop_at=3)
    training.checkpoint.save()
    with pytest.raises(CheckpointError, match="No space left"):
        training.checkpoint.close()
    assert saved(tmp_path) == []


@pytest.mark.parametrize("option", ["localsgd", "dgc", "gradient_merge"])
def test_one_worker_of_a_strategy_with_a_state_of_its_own(option: str, tmp_path: Path) -> None:
    options = {option: True, "localsgd_configs": {"k_steps": 4}, "gradient_merge_configs": {"k_steps": 3}}
    wanted = Training(tmp_path / "whole", options).run(2).numbers()
    Training(tmp_path, options).run(2, stop_at=14)
    again = Training(tmp_path, options)
    assert again.checkpoint.resume()
    assert equal(again.run(2).numbers(), wanted)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"keep": 0}, "at least 1"),
        ({"every": -1}, "at least 0"),
        ({"path": ""}, "name of a folder"),
        ({"path": __file__}, "this is a file"),
        ({"scheduler": 3}, "state_dict"),
        ({"model": 3}, "Module"),
        ({"optimizer": 3}, "Optimizer"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], match: str, tmp_path: Path) -> None:
    fleet.init(is_collective=True, log_level="ERROR")
    given = {"path": tmp_path, "model": torch.nn.Linear(1, 1), **arguments}
    with pytest.raises(ConfigError, match=match):
        fleet.elastic.Checkpoint(**given)


def test_another_model_is_an_error_that_says_so(tmp_path: Path) -> None:
    Training(tmp_path).run(1, stop_at=2)
    fleet.init(is_collective=True, log_level="ERROR")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/step-0000000002 does not match"):
        fleet.elastic.Checkpoint(tmp_path, torch.nn.Linear(2, 2)).resume()


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """Of every worker: a broadcast tells them, so none waits for worker 0."""
    fleet.init(is_collective=True, log_level="ERROR")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/below.*Not a directory"):
        fleet.elastic.Checkpoint(tmp_path / "file" / "below", torch.nn.Linear(2, 2)).resume()


def train_cut_and_go_on(rank: int, world_size: int, folder: str, option: str) -> dict[str, Any]:
    """Trains two epochs, then the same cut after step 5; returns whether and how the second differs from the first."""
    options: dict[str, Any] = {"localsgd_configs": {"k_steps": 4}, "gradient_merge_configs": {"k_steps": 3}}
    options |= {option: True, "dgc_configs": {"rampup_begin_step": 1, "sparsity": [0.9]}} if option else {}
    whole = Training(f"{folder}/whole", options).run(2)
    wanted = whole.numbers()
    # Where one file serves all, only worker 0 can read and write it.
    own = folder if rank == 0 or option else f"{folder}/of worker {rank}"
    first = Training(f"{own}/cut", options, asynchronous=True).run(2, stop_at=5)
    first.checkpoint.close()
    again = Training(f"{own}/cut", options)
    resumed = again.checkpoint.resume()
    again.run(2)
    same_data = first.seen + again.seen == whole.seen
    return {"resumed": resumed, "same data": same_data, "same numbers": equal(again.numbers(), wanted)}


@pytest.mark.parametrize(
    "option",
    [
        "",
        pytest.param("localsgd", marks=pytest.mark.slow),
        pytest.param("dgc", marks=pytest.mark.slow),
        pytest.param("gradient_merge", marks=pytest.mark.slow),
    ],
)
def test_two_workers_resume_exactly(option: str, tmp_path: Path) -> None:
    """004-15: worker 0's file serves both; a state of each worker's own is kept for each."""
    results = run_workers(train_cut_and_go_on, 2, str(tmp_path), option, backend=None)
    assert results == [{"resumed": True, "same data": True, "same numbers": True}] * 2
    assert has_own_states(read_index(LocalFolder(tmp_path / "cut" / "step-0000000005"))) == bool(option)


def train_sharded(rank: int, world_size: int, folder: str, stage: int, stop_at: int) -> dict[str, Any]:
    """Trains with divided states, resuming where something was saved; returns the whole model afterwards."""
    options: dict[str, Any] = (
        {"sharding": True, "sharding_configs": {"stage": stage, "sharding_degree": 2}} if stage else {}
    )
    training = Training(folder if rank == 0 else f"{folder}/of worker {rank}", options)
    training.model.eval()  # no dropout, which differs from worker to worker
    resumed = training.checkpoint.resume()
    training.run(2, stop_at)
    state = training.model.full_state_dict()
    return {"resumed": resumed, "step": training.checkpoint.step, "state": state, "seen": training.seen}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_divided_states_are_saved_whole_and_any_number_resumes(stage: int, tmp_path: Path) -> None:
    """004-14: a checkpoint of two workers with sharding goes on with two, and with one that has none."""
    whole = run_workers(train_sharded, 2, str(tmp_path / "whole"), stage, -1, backend=None)
    run_workers(train_sharded, 2, str(tmp_path / "cut"), stage, 5, backend=None)
    (alone,) = run_workers(train_sharded, 1, str(tmp_path / "cut"), 0, 7, backend=None)
    assert (alone["resumed"], alone["step"]) == (True, 7)
    (tmp_path / "cut" / "step-0000000007").rename(tmp_path / "put aside")
    again = run_workers(train_sharded, 2, str(tmp_path / "cut"), stage, -1, backend=None)
    for rank in range(2):
        assert again[rank]["resumed"]
        for name, value in whole[rank]["state"].items():
            assert torch.allclose(again[rank]["state"][name], value, rtol=0, atol=1e-6), name


def change_number(rank: int, world_size: int, folder: str, option: str) -> dict[str, Any]:
    """Resumes a checkpoint whose workers had states of their own; returns what it says and the parameters."""
    import warnings

    options: dict[str, Any] = {
        option: True,
        "localsgd_configs": {"k_steps": 4},
        "gradient_merge_configs": {"k_steps": 3},
    }
    training = Training(folder, options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        resumed = training.checkpoint.resume()
    weight = training.numbers()[0]
    if not resumed:
        training.run(1, stop_at=3)
        weight = training.numbers()[0]
    return {"weight": weight, "done": training.sampler.done, "said": [str(warning.message) for warning in seen]}


@pytest.mark.slow
@pytest.mark.parametrize("option", ["localsgd", "gradient_merge"])
def test_another_number_of_workers_goes_on_from_the_mean(option: str, tmp_path: Path) -> None:
    two = run_workers(change_number, 2, str(tmp_path), option, backend=None)
    (one,) = run_workers(change_number, 1, str(tmp_path), option, backend=None)
    mean = torch.stack([result["weight"] for result in two]).mean(0)
    assert torch.allclose(one["weight"], mean, rtol=0, atol=1e-6)
    assert one["done"] == 12
    if option == "localsgd":  # gradient_merge has just updated: nothing is a worker's own
        assert not torch.equal(two[0]["weight"], two[1]["weight"])
        assert any("mean of the models" in text for text in one["said"])


def test_a_tilde_in_the_path_is_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", f"{tmp_path}")
    assert Training(Path("~/run")).checkpoint.path == tmp_path / "run"
