"""Scripts of a few lines that are tried: until their second update, in a process that is ready."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleet.migrate.trial_run import Trial, try_in
from fleet.verify.paired_runs import Starter

__all__ = ["Try", "attempts", "train"]

Try = Callable[..., Trial]

_TRAIN = """\
import torch
from fleet import fleet

fleet.init(is_collective=True)
model = torch.nn.Linear(4, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
model = fleet.distributed_model(model)
{before}
for step in range(50):
    loss = model(torch.rand(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    {after}
    optimizer.zero_grad()
{end}
"""


def train(before: str = "", after: str = "pass", end: str = "") -> str:
    """Returns a script with lines before its loop, after each update, and at its end."""
    return _TRAIN.format(before=before, after=after, end=end)


def attempts(start: Starter, folder: Path) -> Try:
    """Returns a function that tries a text in the place of ``work/train.py`` in ``folder``."""
    work = folder / "work"
    work.mkdir()
    (work / "train.py").write_text("raise AssertionError('the old script')\n")

    def run(text: str, *arguments: str, timeout_s: float = 90.0) -> Trial:
        return try_in(folder / "trial", start, work / "train.py", text, arguments, timeout_s)

    return run
