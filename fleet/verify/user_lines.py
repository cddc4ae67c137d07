"""Which lines are the user's (those in no installed package and not in this project), and which a finding names."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fleet.job.whereabouts import line_text
from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding

_PACKAGE = Path(__file__).parent.parent
# Code of this project names its file as it was imported: an editable installation imports through symbolic links.
_OWN = tuple(f"{path}/" for path in (_PACKAGE, _PACKAGE.resolve(), (_PACKAGE.resolve() / "strategies").resolve()))

_LINE_OF = {
    "accumulation-loss-count": "backward",
    "batchnorm-statistics": "forward",
    "buffer-not-synchronised": "forward",
    "dropout-seeded-alike": "forward",
    "gradients-changed-by-worker": "step",
    "gradients-clipped-per-part": "step",
    "gradients-not-averaged": "forward",
    "gradients-summed": "backward",
    "initial-weights-differ": "forward",
    "learning-rate-scaled-twice": "step",
    "loss-over-own-batch": "backward",
    "loss-sum-instead-of-mean": "backward",
    "model-in-evaluation-mode": "forward",
    "optimizer-of-other-parameters": "step",
    "parameter-in-no-optimizer": "step",
    "scheduler-stepped-unevenly": "step",
    "tied-weights-apart": "forward",
}


def user_site() -> str:
    """Returns file:line of the innermost frame that is in no installed package and not in this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_library(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_library(file: str) -> bool:
    """Returns whether a file belongs to Python, an installed package or this project."""
    return (
        file.startswith((*_OWN, "<"))
        or "/site-packages/" in file
        or "/dist-packages/" in file
        or "/fleet/strategies/" in file
        or file.startswith((sys.prefix + "/", sys.base_prefix + "/lib/python"))
    )


def with_line(finding: Finding, many: Run, ranks: Sequence[int]) -> Finding:
    """Returns ``finding`` with the line that calls the model, backward or the optimizer where it went wrong."""
    kind = _LINE_OF.get(finding.cause, "step" if finding.step else "forward")
    if finding.cause in ("unknown", "bits-depend-on-processes") and finding.step:
        kinds = {"input": "forward", "output": "forward", "loss": "backward"}
        kind = "backward" if finding.tensor.startswith("gradient of ") else kinds.get(finding.tensor, "step")
    rank = ranks[0] if finding.rank is None or finding.rank not in ranks else finding.rank
    updates = [one for one in many.updates(rank) if one["n"] == max(finding.step or 1, 1)]
    place = next((one["lines"][kind] for one in updates if kind in one.get("lines", {})), "")
    return finding if finding.where or not place else dataclasses.replace(finding, where=place)


def place_of(where: str) -> str:
    """Returns file:line with the path from the current folder, and the text of the line."""
    path, _, line = where.rpartition(":")
    if not line.isdecimal():
        return where
    return line_text(path, int(line))
