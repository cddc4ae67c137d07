"""try_script: a moved script makes its first updates, which shows errors that reading it does not.

[Note: What a trial may do]
It is one process on the CPU, in a new folder with links to the content of the current one. It reaches no network,
starts no program, and ends at the second update of an optimizer or at the time limit. Files that it changes elsewhere
are put back afterwards. So a trial costs nothing but time; --no-run leaves it out.
"""

from __future__ import annotations

import difflib
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.verify.paired_runs import Run, Starter, VerifyRequest, process_starter, start_run

_STEPS = 2
_LONGEST = 600
_TRAINS = re.compile(r"\.(backward|minimize|train_batch)\(")
# Words in an error -> the next step; the first that occur count.
_ADVICE = {
    "SystemExit: 2": "Give the script its arguments: python -m fleet migrate SCRIPT -- ARGUMENTS.",
    "the trial run has no network": "Download what it needs first, then migrate it again.",
    "the trial run starts no other program": "Migrate it with --no-run, and start it once by hand.",
    "FileNotFoundError": "Migrate it in the folder from which it finds its files, or give their paths after --.",
    "No module named 'paddle": "Move what still uses Paddle, then migrate it again.",
    "name 'paddle' is not defined": "Move what still uses Paddle, then migrate it again.",
    "ModuleNotFoundError": "Install it, then migrate the script again.",
    "target tensor expected": "torch takes class indices of shape [N]: label.flatten(). Paddle takes [N, 1], too.",
}
_GPU = re.compile("NVIDIA|CUDA|nccl|accelerator", re.IGNORECASE)


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        updates: number of updates that the script made.
        why: the reason why the trial proves nothing; '' after a good trial.
        todo: the next step for the user.
        line: the line of the text on which it failed, or 0.
        left: files that it changed and that could not be put back.
    """

    updates: int
    why: str = ""
    todo: str = ""
    line: int = 0
    left: tuple[str, ...] = ()


def try_script(path: Path, text: str, arguments: tuple[str, ...], timeout_s: float) -> Trial:
    """Runs ``text`` in the place of the file at ``path``; see [Note: What a trial may do]."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-migrate-"))
    try:
        with process_starter(folder) as start:
            return try_in(folder / "trial", start, path, text, arguments, timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_in(
    folder: Path, start: Starter, path: Path, text: str, arguments: tuple[str, ...] = (), timeout_s: float = 60.0
) -> Trial:
    """Does what :func:`try_script` does in the new ``folder``, in a process that ``start`` starts."""
    request = VerifyRequest(
        script=path.resolve(), arguments=arguments, workers=1, steps=_STEPS, timeout_s=timeout_s, text=text
    )
    return _judged(start_run(start, request, folder, 1), request)


def _judged(run: Run, request: VerifyRequest) -> Trial:
    end = run.end(0)
    made = len(run.updates(0))
    script = str(request.script)
    own = [int(line) for file, _, line in (place.rpartition(":") for place in end.get("lines", [])) if file == script]
    left = tuple(run.left) + tuple(str(note["text"]) for note in run.of_kind(0, "note"))
    if end["how"] == "failed" or (end["how"] == "killed" and not run.late and not run.stuck):
        why, todo = _failure(run, end, script)
        return Trial(made, f"run for a step, it ends with {why}", todo, own[-1] if own else 0, left)
    if made:
        return Trial(made, left=left)
    if run.late or run.stuck:
        frames = [frame for frame in run.stacks.get(0, []) if frame.startswith(f"{script}:")]
        line = int(frames[0].rpartition(":")[2]) if frames else 0
        todo = f"Give it less data by arguments after --, or longer than --timeout={request.timeout_s:g}."
        return Trial(0, f"it made no update within {request.timeout_s:g} s", todo, line, left)
    if _TRAINS.search(request.text):
        todo = "Give the arguments with which it trains after --, or migrate the file that is started."
        return Trial(0, "run from beginning to end, it made no update, so its training was not tried", todo, 0, left)
    return Trial(0, left=left)


def _failure(run: Run, end: dict[str, Any], script: str) -> tuple[str, str]:
    """Returns the error with which the script ended, and the next step for the user."""
    error, _, where = str(end["error"]).partition("\n@")
    if not error or error.startswith("SystemExit"):  # argparse and sys.exit print the reason
        lines = run.log(0).splitlines()
        error = " ".join([error or "no word of its own:", lines[-1] if lines else ""]).strip()
    if where and where.rpartition(":")[0] != script:
        error += f" ({where})"
    todo = next((todo for words, todo in _ADVICE.items() if words in error), "")
    if not todo and _GPU.search(error):
        todo = "The trial run has no GPU. Migrate it with --no-run on a machine that has one, and start it for a step."
    return " ".join(error.split())[:_LONGEST], todo or "Mend the line, then migrate the script again."


def line_before(old: str, new: str, line: int) -> int:
    """Returns the line of ``old`` that became ``line`` of ``new``, or the one after which it was inserted."""
    pairs = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes()
    for tag, first, last, start, stop in pairs:
        if start < line <= stop:
            return first + line - start if tag == "equal" else max(1, min(last, first + line - start))
    return line
