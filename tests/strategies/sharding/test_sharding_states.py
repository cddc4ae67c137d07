"""sharding: whole states, parts, resuming, merging of batches, and the company of other strategies."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import CheckpointError, ConfigError, OptionWarning
from tests.helpers.workers import run_workers
from tests.strategies.sharding.test_sharding import Net, batch, net_of, options

ADAM = {"lr": 0.01}


def started(configs: dict[str, Any], seed: int, degree: int = 2, **more: Any) -> tuple[Any, Any]:
    """Returns a model and an Adam of a new session."""
    strategy = options(degree, **configs)
    for name, value in more.items():
        setattr(strategy, name, value)
    fleet.init(is_collective=True, strategy=strategy)
    net = net_of(seed)
    optimizer = fleet.distributed_optimizer(torch.optim.Adam([p for p in net.parameters() if p.requires_grad], **ADAM))
    return fleet.distributed_model(net), optimizer


def steps(model: Any, optimizer: Any, rank: int, first: int, last: int) -> None:
    """Trains the steps from ``first`` up to ``last``."""
    for step in range(first, last):
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def error_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """Returns the error that a call raises, with its type."""
    try:
        call(*args, **kwargs)
    except (ConfigError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def warnings_of(call: Any) -> list[str]:
    """Returns the texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, OptionWarning)]


def save_and_resume(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """Trains 4 steps, saves after 2 in every form, resumes from each, and returns what became of it."""
    model, optimizer = started({"stage": stage}, 0)
    steps(model, optimizer, rank, 0, 2)
    full = model.full_state_dict(), optimizer.full_state_dict()
    parts = model.local_state_dict(), optimizer.local_state_dict()
    said = warnings_of(model.state_dict), warnings_of(optimizer.state_dict)
    nothing = model.full_state_dict(keep=False), optimizer.full_state_dict(keep=False)
    steps(model, optimizer, rank, 2, 4)
    straight = model.full_state_dict(), optimizer.full_state_dict()
    found: dict[str, Any] = {"said": said, "nothing": nothing, "full": full, "straight": straight, "same": {}}
    for name, (model_state, optimizer_state) in {"full": full, "parts": parts}.items():
        again, second = started({"stage": stage}, 7)
        again.load_state_dict(model_state)
        second.load_state_dict(copy.deepcopy(optimizer_state))  # torch goes on with the tensors that it is given
        found["entries"] = len(second.local_state_dict()["state"]), len(full[1]["state"])
        steps(again, second, rank, 2, 4)
        found["same"][name] = same(again.full_state_dict(), straight[0]) and same(second.full_state_dict(), straight[1])
    again, second = started({"stage": stage}, 7)
    again.load_full_state_dict(full[0] if rank == 0 else {})
    second.set_state_dict({**copy.deepcopy(parts[1]), "epoch": 3})
    steps(again, second, rank, 2, 4)
    found["same"]["from rank 0"] = same(again.full_state_dict(), straight[0])
    elsewhere = {"fleet_part": {"rank": 1 - rank, "degree": 2}}
    wrong = {**parts[1], **elsewhere}
    other = {name: value for name, value in full[0].items() if name != "last.bias"}
    found["errors"] = [
        error_of(second.load_state_dict, wrong),
        error_of(again.load_full_state_dict, other if rank == 0 else {}),
        error_of(again.load_state_dict, {**parts[0], **elsewhere}) if stage > 1 else "",
    ]
    return found


def same(first: Any, second: Any) -> bool:
    """Returns whether two states are equal to the last bit."""
    flat_first, flat_second = (torch.utils._pytree.tree_leaves(state) for state in (first, second))
    pairs = zip(flat_first, flat_second, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states(stage: int) -> None:
    """Issue: full and sharded states; exact resume; a plain model and a plain optimizer load the whole state."""
    results = run_workers(save_and_resume, 2, stage, backend=None)
    for rank, result in enumerate(results):
        assert result["same"] == {"full": True, "parts": True, "from rank 0": True}
        assert result["nothing"] == ({}, {})
        own, whole = result["entries"]
        assert (own < whole) == (stage == 1)  # a whole state leaves each worker with what it owns
        of_model, of_optimizer = result["said"]
        assert ["model.full_state_dict()" in text for text in of_model] == [True] * (stage > 2)
        assert ["optimizer.full_state_dict()" in text for text in of_optimizer] == [True]
        wrong_optimizer, missing, wrong_model = result["errors"]
        assert f"part {1 - rank} of 2" in wrong_optimizer
        assert "missing: ['last.bias']" in missing
        assert "(worker 0)" in missing
        place = f"{rank} of 2" if stage == 3 else "0 of 1"  # in stage 2 each worker has the whole model
        assert stage == 1 or f"this worker holds part {place}" in wrong_model
    # one process goes on from the whole state: the mean of both workers' losses
    net = Net()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], **ADAM)
    net.load_state_dict(results[0]["full"][0])
    optimizer.load_state_dict(results[0]["full"][1])
    states = net.state_dict()
    for step in range(2, 4):
        for rank in range(2):
            statistics = {name: value.clone() for name, value in net.named_buffers()}
            (net(batch(step, rank)).square().mean() / 2).backward()
            if rank:
                for name, value in net.named_buffers():
                    value.copy_(statistics[name])  # rank 0's statistics count
        optimizer.step()
        optimizer.zero_grad()
    for name, value in results[0]["straight"][0].items():
        torch.testing.assert_close(states[name], value, atol=1e-6, rtol=0, msg=name)


def grow(rank: int, world_size: int, stage: int, state: Any) -> Any:
    """Trains from the start, or resumes a whole state, with as many parts as there are workers."""
    model, optimizer = started({"stage": stage}, 3, degree=world_size)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(copy.deepcopy(state[1]))  # not in memory that the workers of a test share
    steps(model, optimizer, 0, 0, 2)  # the same data everywhere, so that the number of workers changes nothing
    return model.full_state_dict(), optimizer.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_another_number_of_workers(stage: int) -> None:
    """Issue: a whole state of 2 workers goes on with 4 as it does with 2."""
    saved = run_workers(grow, 2, stage, None, backend=None)[0]
    two = run_workers(grow, 2, stage, saved, backend=None)[0]
    four = run_workers(grow, 4, stage, saved, backend=None)[3]
    for first, second in zip(two, four, strict=True):
        for a, b in zip(*(torch.utils._pytree.tree_leaves(state) for state in (first, second)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def merge(rank: int, world_size: int) -> list[Any]:
    """Trains with 4 small batches to an update, in both ways to say so; and with their mean at once."""
    found = []
    for stage in (1, 2, 3):
        model, optimizer = started({"stage": stage, "gradient_merge_acc_step": 4}, 0)
        assert not any(isinstance(m, nn.BatchNorm1d) for m in model.modules()) or model.norm.eval()
        notes = []
        for step in range(8):
            loss = model(batch(step, rank)).square().mean()
            if step % 2:
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # must wait for the merged gradient
            optimizer.minimize(loss)  # runs backward where the loop did not
            optimizer.zero_grad()
            notes.append(optimizer.saving_note() is not None)
        merged = model.full_state_dict()
        strategy_keys = {"hybrid_configs": {"sharding_configs": {"accumulate_steps": 4}}}
        model, optimizer = started({"stage": stage}, 0, **strategy_keys)
        model.norm.eval()
        for step in range(8):
            (model(batch(step, rank)).square().mean() / 4).backward()
            if step == 1:
                early = error_of(optimizer.step)
                dropped = error_of(optimizer.zero_grad) if stage == 3 else ""
            if step % 4 == 3:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        found.append((merged, model.full_state_dict(), notes, early, dropped))
    return found


def save_within_an_update(rank: int, world_size: int, folder: str) -> list[tuple[Any, Any, list[str]]]:
    """Saves a checkpoint with a batch waiting for its update, loads it in a new session, and makes the update."""
    found = []
    for stage in (2, 3):
        path = f"{folder}/{stage}"
        model, optimizer = started({"stage": stage, "gradient_merge_acc_step": 2}, 0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            steps(model, optimizer, rank, 0, 3)
            fleet.checkpoint.save(path, {"model": model, "optimizer": optimizer})
        saved = model.full_state_dict()
        if stage == 2:
            steps(model, optimizer, rank, 3, 4)
            saved = model.full_state_dict()
        model, optimizer = started({"stage": stage, "gradient_merge_acc_step": 2}, 1)
        fleet.checkpoint.load(path, {"model": model, "optimizer": optimizer})
        if stage == 2:
            steps(model, optimizer, rank, 3, 4)
        found.append((saved, model.full_state_dict(), [str(one.message) for one in said]))
    return found


def test_a_checkpoint_within_an_update_is_loaded(tmp_path: Any) -> None:
    """In stage 3 batches that wait are not part of it, which the save says; in stage 2 they are."""
    for stage, (saved, loaded, said) in enumerate(
        run_workers(save_within_an_update, 2, str(tmp_path), backend=None)[0], 2
    ):
        assert any("batches wait for their update" in text for text in said) is (stage == 3)
        for name, value in saved.items():
            torch.testing.assert_close(loaded[name], value, atol=0, rtol=0)


def test_merged_batches_equal_a_big_batch() -> None:
    """A.2: gradient_merge_acc_step counts steps, accumulate_steps backward passes; both equal one big batch."""
    net = net_of(0)
    net.norm.eval()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], **ADAM)
    for first in (0, 4):
        losses = [net(batch(step, rank)).square().mean() for step in range(first, first + 4) for rank in range(2)]
        (sum(losses) / 8).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for results in run_workers(merge, 2, backend=None):
        for stage, (merged, accumulated, notes, early, dropped) in enumerate(results, 1):
            for name, value in net.state_dict().items():
                for kind, state in {"merged": merged, "accumulated": accumulated}.items():
                    message = f"stage {stage}, {kind}: {name}"
                    torch.testing.assert_close(state[name], value, atol=2e-6, rtol=0, msg=message)
            assert "step() came after 2 backward passes" in early
            assert stage < 3 or "cannot be dropped" in dropped
            assert stage < 3 or notes == [True, True, True, False] * 2
