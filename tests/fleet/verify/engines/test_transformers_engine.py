"""transformers' Trainer is changed once a script imports it: on the CPU, with the batches that it takes at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_TRIAL = """
from pathlib import Path
from fleet.verify.engines.training_engine import RunPlan
from fleet.verify.engines.transformers_engine import TransformersEngine

told = []

class Listener:
    def around_batches(self, take):
        return lambda *args, **kwargs: told.append("batches") or take(*args, **kwargs)

    def note(self, text):
        told.append(text)

engine = TransformersEngine()
engine.install(Listener(), RunPlan(alone=True, copies=2, strategy="", folder=Path(".")))
import torch, torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, x, labels=None):
        return {"loss": (self.net(x) - labels).square().mean()}

arguments = TrainingArguments("out", max_steps=1, fp16=True, report_to="none")
assert arguments.use_cpu and arguments.bf16 and not arguments.fp16
assert "float16" in told.pop()
trainer = Trainer(Net(), arguments, train_dataset=[{"x": torch.ones(2), "labels": torch.ones(1)}] * 4)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert engine.job(None) is None
trainer.train()
assert told == ["batches"], told
assert engine.job(None).seeded_by
"""


@pytest.mark.slow
def test_a_trainer_is_changed_when_a_script_imports_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", _TRIAL],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
