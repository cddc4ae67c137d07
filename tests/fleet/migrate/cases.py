"""Scripts to move: what stands in the folder ``scripts``, and short ones around one construct."""

from __future__ import annotations

from pathlib import Path

from fleet.migrate.migrate_command import MigratedScript, migrate

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ("single", "top", "ddp", "spawn", "accelerate", "paddle")

_DDP = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, sampler=DistributedSampler(data))
{before}
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
{after}
"""
_ACCELERATE = """\
import torch
from torch.utils.data import DataLoader
from accelerate import Accelerator

accelerator = Accelerator({arguments})
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        {step}
        optimizer.step()
        optimizer.zero_grad()
{after}
"""
_SINGLE = """\
import torch
from torch.utils.data import DataLoader

torch.manual_seed(0)
{data}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}
for epoch in range(3):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
{after}
"""


def text_of(name: str) -> str:
    """Returns a script of the folder."""
    return (SCRIPTS / f"{name}.py.txt").read_text(encoding="utf-8")


def ddp(before: str = "", after: str = "") -> MigratedScript:
    """Moves a DistributedDataParallel script with lines before and after its loop."""
    return migrate(_DDP.format(before=before, after=after))


def accelerate(arguments: str = "", step: str = "pass", after: str = "") -> MigratedScript:
    """Moves a script of Accelerate with arguments, a line before the update, and lines after the loop."""
    return migrate(_ACCELERATE.format(arguments=arguments, step=step, after=after))


def single(data: str = "loader = DataLoader(data, shuffle=True)", before: str = "", after: str = "") -> MigratedScript:
    """Moves a script of one process with lines that make the loader, and lines before and after the loop."""
    return migrate(_SINGLE.format(data=data, before=before, after=after))


def hand(made: MigratedScript) -> str:
    """Returns what is left to the user, one line each."""
    return "\n".join(f"{found.line} {found.what} | {found.why} | {found.todo}" for found in made.by_hand)
