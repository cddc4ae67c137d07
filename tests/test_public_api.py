"""What users may import, and that importing does nothing else."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fleet
from tests.helpers.ready_python import run_python
from tests.helpers.sources import ROOT


def fresh(code: str, *, flags: tuple[str, ...] = (), without: str = "") -> str:
    """Returns what ``code`` prints in a new interpreter, whose environment has no variable ``without``."""
    environment = {name: value for name, value in os.environ.items() if name != without}
    command = [sys.executable, *flags, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fresh_error(code: str) -> str:
    """Returns the last line of the error with which ``code`` ends in a process that has not imported fleet before."""
    done = run_python(code, cwd=ROOT)
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_public_names_are_sorted_and_exist() -> None:
    assert fleet.__all__ == sorted(set(fleet.__all__))
    for name in fleet.__all__:
        if name not in SESSION_NAMES:
            assert getattr(fleet, name) is not None
    assert set(fleet.__all__) <= set(dir(fleet))


# They answer for a session, so they raise before fleet.init(); tests of the facade call them after it.
SESSION_NAMES = {"session", "util"}


@pytest.mark.parametrize("name", sorted(SESSION_NAMES))
def test_session_names_say_that_init_is_missing(name: str) -> None:
    error = fresh_error(f"import fleet; fleet.{name}")
    assert "fleet.init()" in error


# Requirement B.1 and 003-04: the ways in which scripts write it, and a name that must then be there.
SHAPES = [
    ("from fleet import fleet", "fleet.init"),
    ("import fleet", "fleet.init"),
    ("import fleet as f", "f.DistributedStrategy"),
    ("from fleet import *", "DistributedStrategy"),
    ("from fleet import role_maker", "role_maker.PaddleCloudRoleMaker"),
    ("import fleet.base.role_maker as role_maker", "role_maker.UserDefinedRoleMaker"),
    ("from fleet.base import role_maker", "role_maker.Role.WORKER"),
    ("from fleet import DistributedStrategy", "DistributedStrategy"),
    ("from fleet import get_rank, get_world_size, init_parallel_env, spawn", "spawn"),
    ("from fleet import DataParallel, ParallelEnv", "ParallelEnv"),
    ("from fleet import fleet", "fleet.metrics.acc"),
    ("import fleet.utils", "fleet.utils.run_check"),
    ("from fleet import launch", "launch.__name__"),
    ("from fleet import strategies", "strategies.REGISTRY"),
]


@pytest.mark.parametrize(("statement", "name"), SHAPES)
def test_import_shapes(statement: str, name: str) -> None:
    scope: dict[str, Any] = {}
    exec(statement, scope)
    assert eval(name, scope) is not None


def test_both_spellings_are_one_object() -> None:
    from fleet import fleet as inner

    assert inner is fleet
    assert fleet.fleet is fleet


def test_the_calls_belong_to_one_instance() -> None:
    assert fleet.init.__self__ is fleet.distributed_model.__self__


@pytest.mark.parametrize("name", ["main_program", "_origin_program", "startup_program"])
def test_names_of_programs_say_what_to_use(name: str) -> None:
    """003-16."""
    with pytest.raises(AttributeError, match="nn.Module|initialised when they are made") as caught:
        getattr(fleet, name)
    assert f"fleet.{name}" in str(caught.value)


def test_an_unknown_name_says_the_nearest_one() -> None:
    with pytest.raises(AttributeError, match="'distributed_model'"):
        _ = fleet.distributed_modle


@pytest.mark.parametrize("module", ["fleet.fluid", "fleet.incubate.fleet"])
def test_the_old_namespaces_say_where_to_look(module: str) -> None:
    """003-05."""
    error = fresh_error(f"import {module}")
    assert error.startswith("ImportError: ")
    assert "from fleet import fleet" in error


def test_importing_loads_neither_torch_nor_numpy() -> None:
    modules = "fleet, fleet.launch.cli.cli, fleet.verify.verify_command"
    code = f"import sys, {modules}; print(sorted({{'torch', 'numpy', 'yaml'}} & set(sys.modules)))"
    assert fresh(code) == "[]"


def test_a_job_without_a_divided_model_loads_no_engine_of_one() -> None:
    code = """
import sys
from fleet import fleet
fleet.init(is_collective=True)
folders = "fleet.strategies.tensor_parallel.", "fleet.strategies.pipeline.", "fleet.training.pipeline_model"
print(sorted(name for name in sys.modules if name.startswith(folders)))
"""
    named = ["pipeline.cut", "pipeline.descriptions", "pipeline.pipeline", "tensor_parallel.tensor_parallel"]
    assert run_python(code, cwd=ROOT).stdout.strip() == str([f"fleet.strategies.{name}" for name in named])


WATCH = """
import json, logging, os, signal, sys, threading, warnings
def state():
    handlers = {name: [repr(h) for h in getattr(logger, "handlers", [])]
                for name, logger in [("root", logging.getLogger()), *logging.root.manager.loggerDict.items()]
                if name.partition(".")[0] in ("root", "fleet", "FLEET")}
    signals = {str(number): str(signal.getsignal(number)) for number in signal.valid_signals()}
    return {"environment": dict(os.environ), "signals": signals, "threads": threading.active_count(),
            "handlers": {name: found for name, found in handlers.items() if found},
            "filters": len(warnings.filters), "folder": os.getcwd()}
"""
FULL_IMPORT = """
import fleet, fleet.launch.cli.cli, fleet.strategies
for name in fleet.__all__:
    if name not in ("session", "util"):
        getattr(fleet, name)
import torch
"""


def test_importing_changes_nothing() -> None:
    """Promise of the package: no variable, logging handler, signal, thread, filter or process group at import."""
    code = (
        # What torch's own parts change when they are imported (sympy adds a warning filter) is not ours.
        f"{WATCH}\nimport torch, torch.distributed.fsdp, torch.utils.data, sympy\nbefore = state()\n"
        f"{FULL_IMPORT}\nassert not torch.distributed.is_initialized()\n"
        "after = state()\nprint(json.dumps([before, after]))"
    )
    before, after = json.loads(fresh(code, flags=("-W", "ignore")))
    assert after == before


def test_a_user_module_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    for name in ("launch", "strategies"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport fleet.launch, fleet.strategies"
    assert fresh(f"{code}, launch, strategies\nprint(launch.MINE, strategies.MINE)") == "True True"


COST = """
import gc, time
began = time.process_time()
import torch
torch_s = time.process_time() - began
gc.collect()  # of torch's objects, which takes half as long as all of fleet and would fall into it now and then
start = time.process_time()
from fleet import fleet
fleet.init
print((time.process_time() - start) / torch_s)
"""


@pytest.mark.slow
def test_first_use_costs_little_beside_torch() -> None:
    """At most 0.15 of the processor time that importing torch takes, the median of seven runs.

    Both are compiled already, as installed packages are.
    """
    costs = [float(fresh(COST, without="PYTHONDONTWRITEBYTECODE")) for _ in range(7)]
    assert statistics.median(costs) <= 0.15, costs


@pytest.mark.parametrize(
    ("name", "instead"),
    [("DistributeTranspilerConfig", "a_sync_configs of DistributedStrategy"), ("GeoStrategy", "create_geo_strategy"),
     ("CollectiveOptimizer", "distributed_optimizer")],
)  # fmt: skip
def test_classes_of_1x_name_what_replaced_them(name: str, instead: str) -> None:
    """B.13: scripts of Fleet 1.x import these."""
    with pytest.raises(AttributeError, match=instead):
        getattr(fleet, name)


@pytest.mark.parametrize("name", ["fleet", "fleet.base", "fleet.dataset", "fleet.elastic", "fleet.ps", "fleet.utils"])
def test_names_that_are_resolved_at_first_use_are_listed(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) <= set(dir(module))
