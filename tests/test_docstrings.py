"""The examples in docstrings run and show what is printed."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fleet
from tests.helpers.fleets import own_fleet
from tests.helpers.sources import ROOT, module_name, python_files

# Docstrings whose examples need other processes or programs; what they show is tested elsewhere.
NOT_RUN: dict[str, str] = {
    "fleet": "wraps a model of the user; every test of the facade does the same",
    "fleet.facade.Fleet.prefetch": "needs the loop of a worker; tests/fleet/ps_job/test_prefetch_loops.py has many",
    "fleet.utils.hybrid_parallel_util.fused_allreduce_gradients": "has nobody to exchange with in a single process",
    "fleet.strategies.tensor_parallel.streams.get_rng_state_tracker": "needs the streams of a job",
    "fleet.paddle.data_parallel_layer.DataParallel": "warns in a single process",
    "fleet.checkpoint.paddle_files.paddle_optimizer.paddle_optimizer_state": "needs a file of Paddle; the page runs",
    "fleet.checkpoint.paddle_files.paddle_pickle.read_paddle": "as paddle_optimizer_state",
    "fleet.checkpoint.paddle_files.paddle_state.paddle_state": "as paddle_optimizer_state",
    "fleet.checkpoint.paddle_files.paddle_tables.load_paddle_table": "as paddle_optimizer_state",
    "fleet.checkpoint.paddle_files.paddle_tables.paddle_dense": "as paddle_optimizer_state",
    "fleet.elastic.resize.keep_global_batch": "warns where an optimizer has copied the strategy",
    "fleet.integrations.ray": "needs a cluster of Ray; tests/fleet/integrations does the same",
    "fleet.integrations.ray.launch": "as its module",
    "fleet.job.util.UtilBase.get_file_shard": "shows worker 0 of 2",
    "fleet.facade.Fleet.distributed_scaler": "a GradScaler warns where there is no GPU",
    "fleet.facade.Fleet.group_sharded_parallel": "takes a module of its own, and several workers",
    "fleet.paddle.topology.HybridCommunicateGroup": "needs the groups of several workers",
    "fleet.integrations.hf.FleetTrainer": "trains a model of transformers; test_hf.py does",
    "fleet.parallel.spawning.spawn": "starts processes that import the user's script",
    "fleet.utils.fs.HDFSClient": "needs the hadoop program",
    "fleet.utils._run_check.run_check": "trains on every device",
}


class ShownOutput(doctest.OutputChecker):
    """Compares what an example shows; an example that shows nothing has only to run."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns what an example may use without saying so: an initialised fleet, and a model with its loss."""
    monkeypatch.chdir(tmp_path)
    own_fleet(monkeypatch)
    fleet.init(is_collective=True)
    model = torch.nn.Linear(4, 2)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    model = fleet.distributed_model(model)
    fleet.save({"model": model.state_dict()}, "checkpoint.pdparams")
    loss = model(torch.ones(3, 4)).sum()
    return {"fleet": fleet, "np": np, "torch": torch, "model": model, "net": model.module, "optimizer": optimizer} | {
        "block": torch.nn.Linear(4, 4),
        "x": torch.ones(3, 4),
        "loss": loss,
    }


def modules_with_examples() -> list[str]:
    """Returns the modules that hold a docstring example."""
    paths = python_files("fleet", "strategies", "launch")
    return [module_name(path) for path in paths if ">>> " in (ROOT / path).read_text(encoding="utf-8")]


def examples(name: str) -> list[doctest.DocTest]:
    """Returns the docstrings of a module that hold examples."""
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=name != "fleet")  # its attributes come when asked for
    return [found for found in finder.find(module, name) if found.examples]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_run(name: str, names: dict[str, Any]) -> None:
    runner = doctest.DocTestRunner(ShownOutput(), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        for found in examples(name):
            if found.name not in NOT_RUN:
                found.globs = {**names, **found.globs}
                runner.run(found, out=report.write)
    assert runner.failures == 0, report.getvalue()


def test_every_exception_names_an_example() -> None:
    known = {found.name for name in modules_with_examples() for found in examples(name)}
    assert set(NOT_RUN) - known == set()


def test_a_wrong_example_is_noticed() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    runner = doctest.DocTestRunner(ShownOutput())
    runner.run(wrong, out=lambda text: None)
    assert runner.failures == 1
