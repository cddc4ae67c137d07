"""What type checkers say of scripts: nothing of those that are right, one error for each mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.sources import ROOT
from tests.test_readme import GLANCES, fenced

MISTAKES = """\
import torch
import fleet as whole
from fleet import fleet

strategy = fleet.DistributedStrategy()
strategy.ampp = True  # mistake
strategy.amp = "yes"  # mistake
strategy.fuse_grad_size_in_MB = "16"  # mistake
strategy.amp_configs = {"init_loss_scalin": 1024.0}  # mistake
strategy.sharding_configs["stages"] = 2  # mistake
del strategy.sharding_configs["stages"]  # mistake
strategy.sharding_configs.pop("stages")  # mistake
strategy.sharding_configs.update(stages=2)  # mistake
fleet.init(is_colective=True)  # mistake
whole.innit()  # mistake
fleet.distributed_model(3)  # mistake
fleet.distributed_optimizer(torch.nn.Linear(1, 1))  # mistake
fleet.elastic.Checkpiont  # mistake
"""
RIGHT = """\
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fleet
import fleet.base.role_maker as role_maker
from fleet import DistributedStrategy, get_rank
from fleet import fleet as same
from fleet.elastic import Checkpoint

strategy: DistributedStrategy = same.DistributedStrategy()
strategy.amp = True
strategy.amp_configs = {"init_loss_scaling": 1024, "custom_white_list": ["linear"]}
strategy.amp_configs["incr_ratio"] = 4.0
strategy.amp_configs.incr_ratio = strategy.amp_configs["incr_ratio"]
strategy.recompute_configs["checkpoints"].append("layer1")
strategy.hybrid_configs = {"dp_degree": 2, "pp_configs": {"sync_mode": "average"}}
strategy.hybrid_configs.sharding_configs.accumulate_steps = 2
strategy.localsgd_configs = strategy.localsgd_configs
strategy.amp_configs.update({"incr_ratio": 3.0}, decr_ratio=0.5)
strategy.amp_configs.pop("incr_ratio")
del strategy.amp_configs["decr_ratio"]
build = fleet.BuildStrategy()
build.reduce_strategy = fleet.BuildStrategy.ReduceStrategy.Reduce
strategy.build_strategy = build
strategy.execution_strategy = {"num_threads": 2}
role = role_maker.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role, strategy=strategy)

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fleet.distributed_optimizer(optimizer)
model = fleet.distributed_model(model)
checkpoint = Checkpoint("checkpoints", model, optimizer)
optimizer.minimize(model(torch.ones(1, 1)).sum())
optimizer.clear_grad()
total: float = fleet.util.all_reduce(1.0)
place: int = get_rank() + same.worker_index() + role.get_rank() + role.get_size()
mesh = fleet.get_hybrid_communicate_group()
place += mesh.get_data_parallel_rank() + mesh.get_sharding_parallel_group().nranks
addresses = ",".join(fleet.worker_endpoints()).split(",") + fleet.server_endpoints(to_string=True).split(",")

class Words(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line: str) -> Callable[[], Iterator[Any]]:
        return lambda: iter([[("words", [int(word) for word in line.split()])]])

def step(batch: fleet.dataset.Batch) -> dict[str, torch.Tensor]:
    values, offsets = batch["words"]
    return {"loss": values.sum() + offsets.sum() + batch["label"].float().sum()}

for batch in fleet.InMemoryDataset():
    print(batch["label"].tolist())
"""
# A class of the user's, and what the guides' snippets leave out.
BEFORE = """\
import torch
from torch import nn
from fleet import fleet

class WideDeep(nn.Module):
    pass

model: nn.Module = WideDeep()
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
layers = [nn.Linear(2, 2)]
criterion = nn.MSELoss()
loader = [(torch.ones(2, 2), torch.ones(2, 2))]
"""
# Not the quick start, which is as short as people write it: torch's DistributedSampler would need an annotation.
EXAMPLES = [
    sorted(folder.glob("*.py"))
    for folder in sorted((ROOT / "examples").iterdir())
    if folder.is_dir() and folder.name != "quickstart"
]


def run(*command: str | Path) -> str:
    """Returns what a checker prints; it exits with 1 where it finds errors, and with another number where it fails."""
    words = [sys.executable, "-m", *map(str, command)]  # reading transformers takes minutes, once
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def mypy_errors(*files: Path) -> list[tuple[str, int]]:
    """Returns file and line of each error that ``mypy --strict`` finds; none of the settings are the project's."""
    flags = ["--ignore-missing-imports", "--follow-imports=silent"]
    flags += ["--untyped-calls-exclude=torch"]  # its backward() has no types
    flags += ["--cache-dir", ".mypy_cache/scripts"]  # that of `make lint` stays valid
    found = run("mypy", "--strict", "--config-file=", *flags, *files)
    assert re.search(r"Success: |Found \d+ error", found)
    return [(Path(name).name, int(line)) for name, line in re.findall(r"^(.+?):(\d+): error: ", found, re.MULTILINE)]


def pyright_errors(*files: Path) -> list[tuple[str, int]]:
    """Returns file and line of each error that pyright finds in basic mode."""
    found = json.loads(run("pyright", "--outputjson", "--level", "error", "--pythonpath", sys.executable, *files))
    assert found["summary"]["filesAnalyzed"] == len(files)
    errors = [(Path(error["file"]).name, error["range"]["start"]["line"] + 1) for error in found["generalDiagnostics"]]
    return sorted(set(errors))


Check = Callable[..., list[tuple[str, int]]]
CHECKERS = [pytest.param(mypy_errors, id="mypy"), pytest.param(pyright_errors, id="pyright")]


def written(path: Path, text: str) -> Path:
    """Returns the file, which then holds ``text``."""
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("errors_of", CHECKERS)
def test_each_mistake_is_an_error(errors_of: Check, tmp_path: Path) -> None:
    wrong = [number for number, line in enumerate(MISTAKES.splitlines(), 1) if line.endswith("# mistake")]
    files = written(tmp_path / "wrong.py", MISTAKES), written(tmp_path / "right.py", RIGHT)
    assert errors_of(*files) == [("wrong.py", line) for line in wrong]
    assert len(wrong) == 13


@pytest.mark.slow
@pytest.mark.parametrize("errors_of", CHECKERS)
@pytest.mark.parametrize("files", EXAMPLES, ids=lambda files: files[0].parent.name)
def test_the_examples_have_no_error(errors_of: Check, files: list[Path]) -> None:
    assert len(files) > 2
    assert errors_of(*files) == []


@pytest.mark.slow
@pytest.mark.parametrize("errors_of", CHECKERS)
def test_the_snippets_have_no_error(errors_of: Check, tmp_path: Path) -> None:
    snippets = [code for name in GLANCES for code in fenced(name, "python")]
    files = [written(tmp_path / f"snippet_{place}.py", BEFORE + code) for place, code in enumerate(snippets)]
    assert len(files) == 6
    assert errors_of(*files) == []
