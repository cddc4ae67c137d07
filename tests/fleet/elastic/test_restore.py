"""What resume() reads: content that is built wrongly is left aside, or refused, by all workers alike."""

from __future__ import annotations

import json
import re
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from fleet.checkpoint import to_group
from fleet.checkpoint.index import _sum_of
from fleet.checkpoint.items import SavedTensors
from fleet.checkpoint.model_tensors import ModelTensors
from fleet.checkpoint.optimizer_tensors import OptimizerTensors
from fleet.elastic import restore
from fleet.errors import CheckpointError
from tests.fleet.elastic.training import Training
from tests.helpers.workers import run_workers


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Returns whether all tensors are equal to the bit."""
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    """Changes values of the checkpoint at ``path``, by their place in the index, with the sum that fits."""
    content = json.loads((path / "index.json").read_text())
    content.pop("sha256")
    for place, value in changes.items():
        *above, last = place.split(":")
        found = content
        for key in above:
            found = found[int(key) if isinstance(found, list) else key]
        if value is None:
            del found[last]
        else:
            found[last] = value
    (path / "index.json").write_text(json.dumps({**content, "sha256": _sum_of(content)}))


GROUPS = "values:optimizer/groups@0"
WRONG_FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({GROUPS: 5}, "'optimizer/groups@0' are no groups of an optimizer"),
    "group": ({GROUPS: ["x"]}, "'optimizer/groups@0' are no groups of an optimizer"),
    "epoch": ({"values:run:epoch": True}, r"step-0000000003: run holds a value of type bool at \['epoch'\]"),
    "step": ({"values:run:step": None}, r"step-0000000003: run lacks \['step'\]"),
    "workers": ({"values:run:workers": []}, r"step-0000000003: run holds nothing at \['workers'\]"),
    "random": ({"values:run:workers:0:random:python": "x"}, r"run holds a value of type str at \['python'\], .* list"),
    "no run": ({"values:run": None}, "step-0000000003 is damaged .KeyError"),
    "files": ({"files": "two"}, r"index.json is damaged .AttributeError"),
}


def resume_misshapen(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Returns, by what is wrong with the newest checkpoint, what was resumed and what worker 0 warned of."""
    own = folder if rank == 0 else f"{folder}/of worker {rank}"  # so that worker 0 writes and reads for both
    training = Training(f"{own}/right")
    wanted = training.run(1, stop_at=2).numbers()
    training.run(1, stop_at=3)
    found: dict[str, Any] = {}
    for how, (changes, _) in WRONG_FORMS.items():
        if rank == 0:
            shutil.copytree(f"{folder}/right", f"{folder}/{how}")
            rewrite(Path(folder, how, "step-0000000003"), changes)
        again = Training(f"{own}/{how}")
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            patched.setattr(restore, "_VISIBLE_S", 0.5)  # worker 1 never sees it
            resumed = again.checkpoint.resume(), again.checkpoint.step, equal(again.numbers(), wanted)
        found[how] = resumed, " ".join(f"{warning.message}" for warning in said)
    return found


def test_a_checkpoint_that_is_built_wrongly_is_left_aside_by_all_workers(tmp_path: Path) -> None:
    """Its sums are right; an AttributeError on worker 0 left the others in a broadcast that nobody ended."""
    for rank, found in enumerate(run_workers(resume_misshapen, 2, str(tmp_path), backend=None)):
        for how, (_, match) in WRONG_FORMS.items():
            assert found[how][0] == (True, 2, True), how
            assert rank or re.search(match, found[how][1]), found[how][1]


def fail(call: str) -> Any:
    """Raises what no save or load expects."""
    raise RuntimeError(f"no memory for {call}")


def resume_failing(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Returns, by the call that fails on one worker, what resume() returned or raised, and whether within seconds."""
    own = folder if rank == 0 else f"{folder}/of worker {rank}"  # so that worker 0 writes and reads for both
    training = Training(f"{own}/run")
    wanted = training.run(1, stop_at=2).numbers()
    training.run(1, stop_at=3)
    if rank == 0:
        path = Path(folder, "run", "step-0000000003")
        (name, *_) = json.loads((path / "index.json").read_text())["files"]
        rewrite(path, {f"files:{name}:crc32": "x"})  # which worker 0 alone meets
    found: dict[str, Any] = {}
    failing: dict[str, tuple[int, Any, str]] = {
        "nothing": (-1, None, ""),
        "wanted": (1, ModelTensors, "wanted"),
        "check": (1, OptimizerTensors, "check"),
        "copy": (1, to_group, "copy_from"),
        "read": (0, SavedTensors, "whole"),
        "verify": (0, SavedTensors, "verify"),
        "candidates": (0, restore, "check_whole"),
    }
    for how, (who, where, name) in failing.items():
        again, began = Training(f"{own}/run"), time.monotonic()
        with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            patched.setattr(restore, "_VISIBLE_S", 0.5)  # worker 1 never sees it
            if rank == who:
                patched.setattr(where, name, lambda *_, name=name: fail(name))
            try:
                found[how] = again.checkpoint.resume(), again.checkpoint.step, equal(again.numbers(), wanted)
            except CheckpointError as error:
                found[how] = f"{error}"
        found[how] = found[how], time.monotonic() - began < 30
    return found


def test_an_error_of_one_worker_is_raised_by_all(tmp_path: Path) -> None:
    """Whatever it is: one worker raised alone, and the others waited in the next exchange until its time was over."""
    for found in run_workers(resume_failing, 2, str(tmp_path), backend=None):
        assert found.pop("nothing") == ((True, 2, True), True)
        for how, (said, is_soon) in found.items():
            assert re.search(r"RuntimeError: no memory for \w+", said), (how, said)
            assert f"worker {0 if how in ('read', 'verify', 'candidates') else 1}" in said, (how, said)
            assert is_soon, how


def save_parts(rank: int, world_size: int, folder: str) -> None:
    """Saves parts of two workers under localsgd, at two steps."""
    training = Training(folder, {"localsgd": True, "localsgd_configs": {"k_steps": 3}})
    training.run(1, stop_at=1)
    training.run(1, stop_at=2)


def resume_parts(rank: int, world_size: int, folder: str) -> Any:
    """Returns the step resumed from, or what resume() raised, and whether that changed a number."""
    training = Training(folder, {"localsgd": True, "localsgd_configs": {"k_steps": 3}})
    before = training.numbers()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training.checkpoint.resume()
    except CheckpointError as error:
        return f"{error}", equal(training.numbers(), before)
    return training.checkpoint.step


def test_a_worker_part_that_is_built_wrongly_is_met_by_all_workers_alike(tmp_path: Path) -> None:
    """As many workers, and another number, take the checkpoint before it."""
    run_workers(save_parts, 2, str(tmp_path), backend=None)
    path = tmp_path / "step-0000000002"
    (piece,) = json.loads((path / "index.json").read_text())["tensors"]["@1/model/0.weight"]["pieces"]
    rewrite(path, {"values:@1/optimizer/groups@0": 5, f"files:{piece[0]}:crc32": [0]})
    assert run_workers(resume_parts, 2, str(tmp_path), backend=None) == [1, 1]
    assert run_workers(resume_parts, 3, str(tmp_path), backend=None) == [1, 1, 1]


def test_an_optimizer_may_keep_values_of_its_own_beside_those_of_parameters(tmp_path: Path) -> None:
    """torch saves and loads what an optimizer puts into its state under a name."""
    training = Training(tmp_path)
    training.run(1, stop_at=1)
    training.optimizer.state["turns"] = 5  # type: ignore[index]
    training.checkpoint.save()
    again = Training(tmp_path)
    assert again.checkpoint.resume()
    assert again.optimizer.state["turns"] == 5  # type: ignore[index]
