"""Accelerate is changed once a script imports it: its loaders, its calls of all workers, and FSDP2 on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TRIAL = """
from contextlib import contextmanager
from pathlib import Path
from fleet.verify.engines.accelerate_engine import AccelerateEngine
from fleet.verify.engines.training_engine import RunPlan

told = []

class Listener:
    def around_loop(self, loop, base, is_last, *, own_batches):
        def iterated(loader):
            told.append((type(base(loader)).__name__, own_batches))
            return loop(loader)
        return iterated

    @contextmanager
    def collective(self, name, given):
        told.append(name)
        yield

engine = AccelerateEngine()
engine.install(Listener(), RunPlan(alone=True, copies=2, strategy="", folder=Path(".")))
import torch, torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
assert dist.is_initialized() and dist.get_world_size() == 1 and accelerator.is_fsdp2
assert accelerator.device.type == "cpu"
assert [batch.tolist() for batch in accelerator.prepare(DataLoader(range(4), batch_size=2))] == [[0, 1], [2, 3]]
accelerator.reduce(torch.ones(1))
assert engine.job(None) is None
accelerator.state.distributed_type = "MULTI_CPU"
from accelerate.local_sgd import LocalSGD
LocalSGD(accelerator=accelerator, model=torch.nn.Linear(1, 1), local_sgd_steps=2)
assert (engine.job(None).engine, engine.job(None).plan) == ("accelerate", ("localsgd",))
assert told == [("DataLoader", True), "accelerator.reduce"], told
"""


def test_accelerate_is_changed_when_a_script_imports_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    worker = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env = {**os.environ, **worker, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _TRIAL]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
