"""Lightning's Trainer with FleetStrategy: users' scripts on two workers train as Lightning alone does in one process.

Importing Lightning takes seconds, so whole lists of scripts share their processes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.workers import run_workers

pytestmark = pytest.mark.slow
ALONE: dict[str, str | None] = dict.fromkeys(
    ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
)


def run_cases(rank: int, world_size: int, kind: str, folder: str) -> dict[str, Any]:
    """Runs all cases of ``kind``; Lightning is imported here, and not where tests are collected."""
    from tests.helpers import lightning_cases

    return lightning_cases.run(rank, world_size, kind, folder)


def compare(kind: str, folder: Path) -> None:
    """Raises AssertionError unless all cases of ``kind`` have the results of one process."""
    (alone,) = run_workers(run_cases, 1, kind, str(folder / "alone"), backend=None, timeout_s=300, environment=ALONE)
    first, second = run_workers(run_cases, 2, kind, str(folder / "two"), backend=None, timeout_s=300)
    assert len(first) > len(alone) > 4
    for title, found in first.items():
        expected = alone[title.partition(" stage")[0]]
        assert found.keys() == expected.keys(), title
        for name, value in found.items():
            where = f"{title}: {name}"
            if isinstance(value, torch.Tensor | float):
                torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5, msg=where)
                torch.testing.assert_close(second[title][name], value, atol=0, rtol=0, msg=f"{where} of worker 1")
            else:
                assert value == expected[name] == second[title][name], where


def test_scripts_train_as_in_one_process(tmp_path: Path) -> None:
    compare("trainer", tmp_path)


ORDER = """
import sys
import torch, lightning.pytorch as pl
from torch.utils.data import DataLoader, DistributedSampler
from fleet.integrations.lightning import FleetStrategy

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = torch.nn.Linear(1, 1), {}
    def training_step(self, batch, index):
        self.seen.setdefault(self.current_epoch, []).extend(batch.flatten().int().tolist())
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)

rows = torch.arange(12.0).view(12, 1)
seen = []
for path in (None, "step=4.ckpt"):
    keep = pl.callbacks.ModelCheckpoint(dirpath=".", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(strategy=FleetStrategy(), max_epochs=2, accelerator="cpu", callbacks=[keep], **quiet)
    loader = DataLoader(rows, 3, sampler=DistributedSampler(rows, 1, 0, seed=1), num_workers=int(sys.argv[1]))
    trainer.fit(module := Module(), loader, ckpt_path=path, weights_only=True if path else None)
    seen.append(module.seen[1])
print(seen[0] == seen[1])
"""


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resume_at_an_epochs_end_has_the_order_of_the_next(num_workers: int, tmp_path: Path) -> None:
    """Issue 37, 1: processes of the loader were started before the sampler had its epoch, and gave epoch 0 again."""
    (tmp_path / "order.py").write_text(ORDER)
    command = [sys.executable, "order.py", str(num_workers)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert ran.stdout.split()[-1:] == ["True"], ran.stderr[-2000:]
