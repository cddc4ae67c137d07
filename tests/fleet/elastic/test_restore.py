"""What resume() reads: content that is built wrongly is left aside, or refused, by all workers alike."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from fleet.elastic._folder import Part, sum_of
from fleet.elastic._torch_files import write_manifest
from fleet.errors import CheckpointError
from tests.fleet.elastic.training import Training
from tests.helpers.workers import run_workers


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Returns whether all tensors are equal to the bit."""
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def rewrite(path: Path, name: str, content: Any) -> None:
    """Puts ``content`` into the file ``name`` of the checkpoint at ``path``, with the sums that fit it."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").unlink()
    if name == "manifest.json":
        manifest.update(content)
    else:
        torch.save(content, path / name)
        data = (path / name).read_bytes()
        manifest["parts"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    parts = {part: Part(at["bytes"], at["sha256"]) for part, at in manifest["parts"].items()}
    values = {k: v for k, v in manifest.items() if k not in ("format", "version", "parts", "sha256")}
    write_manifest(path, values, parts)


SGD = {"state": {}, "param_groups": [{"params": [0]}]}
WRONG_FORMS: dict[str, tuple[str, Any, str]] = {
    "model": ("model.pt", [1, 2], "model.pt holds a value of type list, where type dict is required"),
    "optimizer": ("optimizer.pt", {**SGD, "state": 5}, r"optimizer.pt holds a value of type int at \['state'\]"),
    "entry": ("optimizer.pt", {**SGD, "state": {0: 5}}, r"optimizer.pt holds a value of type int at \['state'\]\[0\]"),
    "group": ("optimizer.pt", {**SGD, "param_groups": "x"}, r"optimizer.pt .* type str at \['param_groups'\], .* list"),
    "no group": ("optimizer.pt", {**SGD, "param_groups": []}, r"optimizer.pt holds nothing at \['param_groups'\]"),
    "rest": ("rest.pt", {"epoch": True}, r"rest.pt holds a value of type bool at \['epoch'\]"),
    "workers": ("rest.pt", {"epoch": 1}, r"rest.pt lacks \['step'\]"),
    "manifest": (
        "manifest.json",
        {"world_size": "two"},
        r"manifest.json holds a value of type str at \['world_size'\]",
    ),
}


def resume_misshapen(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Returns, by what is wrong with the newest checkpoint, what was resumed and what worker 0 warned of."""
    own = folder if rank == 0 else f"{folder}/of worker {rank}"  # so that worker 0 writes files of torch.save
    training = Training(f"{own}/right")
    wanted = training.run(1, stop_at=2).numbers()
    training.run(1, stop_at=3)
    found: dict[str, Any] = {}
    for how, (name, content, _) in WRONG_FORMS.items():
        if rank == 0:
            shutil.copytree(f"{folder}/right", f"{folder}/{how}")
            rewrite(Path(folder, how, "step-0000000003"), name, content)
        again = Training(f"{own}/{how}")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed = again.checkpoint.resume(), again.checkpoint.step, equal(again.numbers(), wanted)
        found[how] = resumed, " ".join(f"{warning.message}" for warning in said)
    return found


def test_a_checkpoint_that_is_built_wrongly_is_left_aside_by_all_workers(tmp_path: Path) -> None:
    """Its sums are right; an AttributeError on worker 0 left the others in a broadcast that nobody ended."""
    for rank, found in enumerate(run_workers(resume_misshapen, 2, str(tmp_path), backend=None)):
        for how, (_, _, match) in WRONG_FORMS.items():
            assert found[how][0] == (True, 2, True), how
            assert rank or re.search(f"step-0000000003: {match}", found[how][1]), found[how][1]


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
    path = tmp_path / "step-0000000002" / "index.json"
    content = json.loads(path.read_text())
    content.pop("sha256")
    content["values"]["@1/optimizer/groups@0"] = 5
    (piece,) = content["tensors"]["@1/model/0.weight"]["pieces"]
    content["files"][piece[0]]["crc32"][0] ^= 1
    path.write_text(json.dumps({**content, "sha256": sum_of(content)}))
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
