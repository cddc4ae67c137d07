"""Lightning is changed once a script imports it: its processes, its loaders, and its calls of all workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TRIAL = """
from contextlib import contextmanager
from pathlib import Path
from fleet.verify.engines.lightning_engine import LightningEngine
from fleet.verify.engines.training_engine import RunPlan

told = []

class Listener:
    @contextmanager
    def collective(self, name):
        told.append(name)
        yield

LightningEngine().install(Listener(), RunPlan(alone=True, copies=2, strategy="", folder=Path(".")))
import lightning as L
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader
for strategy in ("auto", "ddp", "ddp_spawn", DDPStrategy(find_unused_parameters=True)):
    made = L.Trainer(devices=2, strategy=strategy, accelerator="gpu", logger=False)
    assert made.world_size == 1 and isinstance(made.strategy, DDPStrategy), strategy
    assert made.strategy.root_device.type == "cpu"
loader = DataLoader(range(4), batch_size=2)
loader.__dict__["_fleet_key"] = "train.py:3#1"
assert made.strategy.cluster_environment.creates_processes_externally
assert made._data_connector._prepare_dataloader(loader, True, None).__dict__["_fleet_key"] == "train.py:3#1"
made.strategy.reduce_boolean_decision(True)
assert told[0] == "Lightning's reduce_boolean_decision", told
"""


@pytest.mark.slow
def test_lightning_is_changed_when_a_script_imports_it(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    started = {**os.environ, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL],
        cwd=tmp_path,
        env=started,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
