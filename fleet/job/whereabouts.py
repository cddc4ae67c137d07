"""Whereabouts: where a worker is in the user's script, whether it waits for others, and whether the job can go on."""

from __future__ import annotations

import json
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeAlias

from fleet.launch.processes.stacks import Frame, Stack

Described: TypeAlias = Callable[[int], str]  # the place of a rank on the mesh: "pp 0, mp 1", or an empty string

BUSY, WAITS, MEETS, ENDED, SILENT = "busy", "waits", "meets", "ended", "silent"
_TORCH = find_spec("torch")  # not imported: a command that starts no torch reads what errors mean
_LIBRARIES = (
    f"{Path(__file__).parents[1]}{os.sep}",
    f"{Path(str(_TORCH and _TORCH.origin)).parent}{os.sep}",
    f"{sysconfig.get_path('stdlib')}{os.sep}",
    "<",  # frozen modules, and functions that dataclasses generate
)
_DEPTH = 6
_MAX_SOURCE = 60


@dataclass(frozen=True)
class Whereabouts:
    """A worker's report about itself.

    Attributes:
        state: BUSY in its own work, WAITS in a torch exchange, MEETS in a call that every worker makes, ENDED, or
            SILENT when it did not answer.
        where: the line of the user's script, or how it ended.
        call: the call in which it MEETS, or torch's function in which it WAITS, where that is known.
        step: steps it has finished.
        since_s: seconds that it has been in WAITS without running.
    """

    state: str
    where: str = ""
    call: str = ""
    step: int = 0
    since_s: float = 0.0

    def to_text(self) -> str:
        """Returns the text for :meth:`from_text`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes | str) -> Whereabouts:
        """Returns the report that another worker wrote."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        after = f", after step {self.step}"
        if self.state == BUSY:
            return f"is busy at {self.where}{after}"
        if self.state == WAITS:
            return f"waits in an exchange{f' ({self.call})' if self.call else ''} at {self.where}{after}"
        if self.state == MEETS:
            return f"waits in {self.call} at {self.where}{after}"
        if self.state == ENDED:
            return f"has ended{self.where}"
        return "does not answer: it was killed, or a call holds Python's GIL"


def can_go_on(found: Mapping[int, Whereabouts], waited_s: float) -> bool:
    """Returns whether some worker may still make the call that the others wait for.

    A worker that has not run for ``waited_s`` seconds in an exchange cannot, nor can a worker that waits in a call of
    all workers. Where all wait at one line, the exchange may be slow, unless they wait in different exchanges twice as
    long.

    Example:
        >>> can_go_on({0: Whereabouts(MEETS), 1: Whereabouts(BUSY)}, 1.0)
        True
        >>> can_go_on({0: Whereabouts(MEETS), 1: Whereabouts(WAITS, since_s=2.0)}, 1.0)
        False
    """
    if any(at.state in (BUSY, SILENT) or (at.state == WAITS and at.since_s < waited_s) for at in found.values()):
        return True
    if any(at.state != WAITS for at in found.values()) or len({at.where for at in found.values()}) > 1:
        return False
    calls = {at.call for at in found.values()}
    return len(calls) == 1 or "" in calls or any(at.since_s < 2 * waited_s for at in found.values())


def account(found: Mapping[int, Whereabouts], described: Described | None = None) -> str:
    """Returns a line for each place in the script, with the ranks that are there and their places on the mesh."""
    ranks: dict[str, list[int]] = {}
    for rank, at in sorted(found.items()):
        ranks.setdefault(f"{at}", []).append(rank)
    return "\n".join(f"  {named(where, described)}: {text}" for text, where in ranks.items())


def named(ranks: list[int], described: Described | None = None) -> str:
    """Returns ``rank 1`` or ``ranks 1, 2``; with ``described`` also their places: ``rank 1 (pp 0, mp 1)``."""
    places = ["" if described is None else described(rank) for rank in ranks]
    shown = [f"{rank} ({place})" if place else f"{rank}" for rank, place in zip(ranks, places, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def is_waiting(frame: FrameType) -> bool:
    """Returns whether ``frame``, a thread's innermost frame, is in an exchange with other workers."""
    inner = islice(_outward(frame), _DEPTH)
    return Stack(tuple(Frame(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in inner)).waits


def collective_of(frame: FrameType) -> str:
    """Returns the innermost function of torch.distributed that ``frame`` is in, or an empty string."""
    inside = (f.f_code for f in islice(_outward(frame), _DEPTH))
    return next((code.co_name for code in inside if "/torch/distributed/" in code.co_filename), "")


def user_line(frame: FrameType | None = None) -> str:
    """Returns the innermost line of the user's code at ``frame`` (the caller's) or outside it, with its text."""
    own = user_frame(frame or sys._getframe(1))
    return line_text(own.f_code.co_filename, own.f_lineno)


def user_frame(frame: FrameType) -> FrameType:
    """Returns the innermost frame of the user's code at ``frame`` or outside it; without any, the outermost frame."""
    while not _is_own(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def how_it_ended(error: BaseException | None) -> str:
    """Returns the report of a worker that ends with ``error``."""
    return "" if error is None else f" with {type(error).__name__} at {user_line_of(error.__traceback__)}"


def user_line_of(trace: TracebackType | None, otherwise: str = "an unknown line") -> str:
    """Returns the innermost line of the user's code in a traceback, or ``otherwise`` if no frame is the user's."""
    found = otherwise
    while trace is not None:
        if _is_own(trace.tb_frame.f_code.co_filename):
            found = line_text(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def line_text(file: str, number: int) -> str:
    """Returns a line's place and text: ``"train.py:9 `loss.backward()`"``."""
    source = linecache.getline(file, number).strip()
    inside = file.startswith(os.getcwd() + os.sep)
    shown = f"{os.path.relpath(file) if inside else file}:{number}"
    return f"{shown} `{source[:_MAX_SOURCE]}`" if source else shown


@cache
def _is_own(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and "site-packages" not in file and "dist-packages" not in file


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
