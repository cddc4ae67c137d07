"""ParallelEnv, rank and size, and spawn."""

from __future__ import annotations

import atexit
import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fleet.common.exit_status import EXIT
from fleet.env import Environment
from fleet.errors import ConfigError, NotInitializedError, UnknownOptionError, UnsupportedOptionError
from fleet.parallel import ParallelEnv, get_rank, get_world_size, spawn, spawning
from tests.fleet.role_maker.test_fleet_contract import LAUNCHED
from tests.fleet.role_maker.test_starters import TORCHRUN
from tests.helpers.workers import run_workers

QUICK: dict[str, Any] = {"backend": "gloo", "start_method": "forkserver"}
NO_GPU = not torch.cuda.is_available()


def test_parallel_env_under_the_launcher() -> None:
    """B.11: the attributes of paddle.distributed.ParallelEnv."""
    env = ParallelEnv(Environment(LAUNCHED))
    assert (env.rank, env.world_size, env.local_rank, env.nranks) == (1, 2, 1, 2)
    assert (env.device_type, env.device_id, env.dev_id) == ("cpu", 0, 0)
    assert env.current_endpoint == "10.0.0.1:6171"
    assert env.trainer_endpoints == ["10.0.0.1:6170", "10.0.0.1:6171"]
    assert (env.nrings, env.pg_timeout) == (1, 1800000)


def test_parallel_env_elsewhere() -> None:
    env = ParallelEnv(Environment({**TORCHRUN, "PADDLE_PG_TIMEOUT": "5000", "FLAGS_nccl_nrings": "8"}))
    assert (env.rank, env.local_rank, env.current_endpoint, env.trainer_endpoints) == (3, 3, "", [])
    assert (env.nrings, env.pg_timeout) == (8, 5000)
    assert ParallelEnv(Environment({})).world_size == 1


def test_selected_devices() -> None:
    chosen = {"FLAGS_selected_gpus": "2", "PADDLE_LOCAL_DEVICE_IDS": "6"}
    assert ParallelEnv(Environment(chosen)).device_id == 2  # among the visible ones, not the absolute number


def test_workers_that_share_a_gpu_through_gloo_are_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """B.11: the kind is that of the device on which fleet.init puts the worker."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shared = {"PADDLE_DISTRI_BACKEND": "gloo", "FLAGS_selected_gpus": "0"}
    assert ParallelEnv(Environment({**LAUNCHED, **shared})).device_type == "gpu"
    assert ParallelEnv(Environment({"PADDLE_DISTRI_BACKEND": "gloo"})).device_type == "cpu"


@pytest.mark.parametrize("value", ["0", "9"])
def test_rings_are_one_to_eight(value: str) -> None:
    """B.11."""
    with pytest.raises(ConfigError, match="FLAGS_nccl_nrings"):
        ParallelEnv(Environment({"FLAGS_nccl_nrings": value}))


def test_before_a_group_runs_the_starter_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert (get_rank(), get_world_size()) == (1, 2)
    with pytest.raises(NotInitializedError, match=r"get_rank\(group=...\)"):
        get_rank(group=object())  # type: ignore[arg-type]


def _in_a_group(rank: int, world_size: int) -> list[int]:
    pair = dist.new_group([1, 2])
    inside = [get_rank(pair), get_world_size(pair)] if rank else []
    return [get_rank(), get_world_size(), *inside]


def test_in_a_group_the_group_is_asked() -> None:
    wrong = {"PADDLE_TRAINER_ID": "0"}  # not asked any more
    assert run_workers(_in_a_group, 3, environment=wrong) == [[0, 3], [1, 3, 0, 2], [2, 3, 1, 2]]


def _write_environment(folder: str, word: str) -> None:
    names = ("PADDLE_TRAINERS_NUM", "PADDLE_CURRENT_ENDPOINT", "PADDLE_DISTRI_BACKEND", "WORLD_SIZE", "RANK")
    rank = os.environ["PADDLE_TRAINER_ID"]
    assert ParallelEnv().rank == int(rank)
    Path(folder, rank).write_text(" ".join([word, *(os.environ[name] for name in names)]))


def _fail(word: str) -> None:
    raise ValueError(f"{word} on {os.environ['RANK']}")


def _fail_noted(folder: str) -> None:
    atexit.register(lambda: Path(folder, "code").write_text(f"{EXIT.code}", encoding="utf-8"))
    raise ValueError("why")


def _all_reduce(folder: str) -> None:
    import fleet

    fleet.init(is_collective=True)
    total = fleet.all_reduce(fleet.worker_index() + 1)
    Path(folder, str(fleet.worker_index())).write_text(f"{total} {fleet.worker_num()} {fleet.local_rank()}")


@pytest.mark.parametrize("start_method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_spawn_sets_fleets_environment(tmp_path: Path, start_method: str) -> None:
    """B.11: each process is a worker of one job; the caller's own environment is left alone."""
    before = dict(os.environ)
    spawn(_write_environment, (str(tmp_path), "hi"), nprocs=2, start_method=start_method, backend="gloo")
    found = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert [row[0] for row in found] == ["hi", "hi"]
    assert [row[1] for row in found] == ["2", "2"]
    assert found[0][2] != found[1][2]
    assert [row[3:] for row in found] == [["gloo", "2", "0"], ["gloo", "2", "1"]]
    assert dict(os.environ) == before


def test_spawned_workers_train_together(tmp_path: Path) -> None:
    context = spawn(_all_reduce, (str(tmp_path),), nprocs=2, join=False, daemon=True, **QUICK)
    while not context.join(timeout=30):
        pass
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3 2 0", "3 2 1"]


@pytest.mark.slow
def test_workers_of_spawn_end_without_noise(tmp_path: Path) -> None:
    """Their exit functions run at their exit; torch's found its own module gone, 17 times a worker."""
    script = tmp_path / "train.py"
    script.write_text(
        "import fleet, torch\n"
        "def train():\n"
        "    fleet.init_parallel_env()\n"
        "    fleet.DataParallel(torch.nn.Linear(4, 1))(torch.ones(1, 4)).sum().backward()\n"
        "if __name__ == '__main__':\n"
        "    fleet.spawn(train, backend='gloo', nprocs=2)\n"
        "    print('end')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.endswith("end\n")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_an_error_of_a_worker_is_raised_here() -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="why on 0"):
        spawn(_fail, ("why",), nprocs=1, **QUICK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nprocs": 0}, "nprocs=0"),
        ({"nprocs": 1.5}, "nprocs=1.5"),
        ({"nprocs": True}, "nprocs=True"),
        ({"nprocs": 2, "start_method": "thread"}, "start_method='thread'"),
        ({"nprocs": 2, "backend": "mpi"}, "backend='mpi'"),
        ({"nprocs": 2, "ips": "10.0.0.1,10.0.0.2"}, "ips='10.0.0.1"),
        ({"nprocs": 2, "gpus": "0,0", "backend": "gloo"}, "gpus='0,0'"),
        ({"nprocs": 2, "gpus": "x"}, "gpus='x'"),
        ({"nprocs": 2, "gpus": ""}, "gpus=''"),
        ({"func": 3, "nprocs": 1}, "func=3"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spawn(**{"func": _fail, **arguments})


def test_exit_functions_know_that_the_function_failed(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="why"):
        spawn(_fail_noted, (str(tmp_path),), nprocs=1, **QUICK)
    assert (tmp_path / "code").read_text(encoding="utf-8") == "1"


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="'backend'"):
        spawn(_fail, nprocs=1, backnd="gloo")


@pytest.mark.skipif(not NO_GPU, reason="needs a machine without GPU")
def test_without_a_gpu_a_number_is_needed() -> None:
    with pytest.raises(ConfigError, match="Give a number"):
        spawn(_fail)
    with pytest.raises(ConfigError, match="backend='nccl'"):
        spawn(_fail, nprocs=1, backend="nccl")


def test_several_processes_on_windows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """000-04, 000-30: distributed training is refused, a single process is not."""
    monkeypatch.setattr(platform, "system", lambda: "Windows")
    with pytest.raises(UnsupportedOptionError, match="Windows"):
        spawn(_fail, nprocs=2, backend="gloo")
    with pytest.raises(torch.multiprocessing.ProcessRaisedException):
        spawn(_fail, ("x",), nprocs=1, **QUICK)
    assert sys.platform != "win32"


def nothing() -> None:
    """A function that could be imported."""


def test_a_function_that_new_processes_cannot_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner() -> None: ...

    def started(*args: object, **kwargs: object) -> str:
        return "started"

    monkeypatch.setattr(spawning, "start_processes", started)
    for func, reason in ((lambda: None, "is a lambda"), (inner, "inside another function"), (partial(inner), "inside")):
        with pytest.raises(ConfigError, match=reason):
            spawn(func, nprocs=2, backend="gloo")
        assert spawn(func, nprocs=2, backend="gloo", start_method="fork") == "started"
    assert spawn(nothing, nprocs=2, backend="gloo") == "started"
    monkeypatch.setattr(nothing, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # as in a notebook: it has no file
    with pytest.raises(ConfigError, match=r"in a notebook .* Put it in a .py file"):
        spawn(nothing, nprocs=2, backend="gloo")
