"""Why two runs cannot be compared, in words for the user."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fleet.verify.data_findings import permutation_reason, shared_rows
from fleet.verify.number_findings import Comparison
from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding
from fleet.verify.user_lines import place_of
from fleet.verify.waiting_findings import own_frame

_OF_OTHER_DRAWS = ("unknown", "loss-over-own-batch")  # what other masks make of the numbers as well
VERIFY_FOLDER = f"{Path(__file__).parent}{os.sep}"
_ITSELF = "fleet verify itself failed"
DIVIDED_DROPOUT = (
    "The model has dropout and is divided among the workers: one process cannot be given the masks of its parts. Set "
    "the rates of dropout to 0 to compare the rest."
)


class NotComparable(Exception):
    """The two runs cannot be compared; the text says why."""


def own_failure(error: BaseException) -> str:
    """Returns what is said of an error that verify raised itself: the innermost line of its own, and the error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(VERIFY_FOLDER)]
    place = f" at fleet/verify/{frames[-1].filename.removeprefix(VERIFY_FOLDER)}:{frames[-1].lineno}" if frames else ""
    return f"{_ITSELF}{place}: {type(error).__name__}: {error}"


def with_advice(failure: str) -> str:
    """Returns what :func:`own_failure` says, and what to do about it."""
    return (
        f"{failure}. This is no mistake of the script: please report it, with what another run with --keep FOLDER "
        "leaves in that folder."
    )


def _own_failure_of(run: Run, rank: int) -> str:
    """Returns the failure of verify itself with which a process ended; "" where it did not end so."""
    error, _, where = str(run.end(rank).get("error", "")).partition("\n@")
    return with_advice(f"{error} ({where})" if where else error) if error.startswith(_ITSELF) else ""


def places(run: Run) -> str:
    """Returns where the processes of a run are that had not ended, by the user's line where there is one."""
    known = {rank: own_frame(frames) or frames[0] for rank, frames in run.stacks.items() if frames}
    return "; ".join(f"worker {rank} at {place}" for rank, place in known.items())


def unequal_draws_reason(one: Run, findings: Sequence[Finding]) -> str:
    """Returns which draws of the workers one process could not be given, where they may have made ``findings``.

    Where verify itself failed in the one process, its later updates are missing, and that is returned.
    """
    if failure := _own_failure_of(one, 0):
        return failure
    drawn = dict.fromkeys(one.end(0).get("unequal_draws") or [])
    if not drawn or not findings or not _is_of_other_draws(findings[0]):
        return ""
    return (
        f"One process could not be given what the workers drew with {', '.join(drawn)}, whose shape follows neither "
        "the rows of the batch nor their length, and the numbers differ. Turn these draws off (rates of dropout 0) to "
        "compare the rest."
    )


def unseen_draws_reason(many: Run, one: Run, findings: Sequence[Finding]) -> str:
    """Returns which module draws numbers that verify neither sees nor replays, before the first of ``findings``.

    It is no evidence then: numbers that follow other draws differ in a correct script as well. ``""``: none does, or a
    factor of all gradients or a difference between the workers says more than the draws can explain.
    """
    if not findings or not (_is_of_other_draws(findings[0]) or findings[0].cause == "accumulation-loss-count"):
        return ""
    updates = [*one.updates(0), *chain.from_iterable(many.updates(rank) for rank in range(len(many.records)))]
    seen = [update["unseen"] for update in updates if update["n"] <= (findings[0].step or 1) and update.get("unseen")]
    if not seen:
        return ""
    module, kind = seen[0]["module"], seen[0]["type"]
    who = f"{module or 'The model'} ({kind})" if kind else "The training loop"
    return (
        f"{who} draws random numbers {'at' if seen[0]['ended'] else 'before'} {place_of(seen[0]['where'])}, by an "
        "operation of torch that verify does not replay: one process cannot be given what the workers drew, and the "
        "numbers differ. Turn these draws off (rates of dropout 0), or draw them by torch.rand and multiply, to "
        "compare the rest."
    )


def _is_of_other_draws(finding: Finding) -> bool:
    """Returns whether other draws alone may be what differs: they make other outputs of every module after them."""
    return finding.cause in _OF_OTHER_DRAWS or finding.tensor == "output"


def foreign_inputs_reason(many: Run, ranks: Sequence[int], module: str) -> str:
    """Returns why the inputs of a module are not those of the workers."""
    if many.of_kind(0, "batch"):
        return (
            f"The inputs of {module} differ between the runs: between the DataLoader and the model the script changes "
            "batches by what one process cannot be given, such as other samples of the same batch (flip, roll, a sort) "
            "or a generator of its own."
        )
    rows = [_rows_of(many, rank) for rank in ranks]
    said = [
        f"The inputs of {module} differ between the runs: they do not come from a torch DataLoader (the script reads "
        "its batches itself), and one process cannot be given what the workers had."
    ]
    if shared := len(shared_rows(rows)):
        said.append(
            f"In the first updates {shared} of {len(set().union(*rows))} rows went to more than one worker, and no "
            "worker had a row twice itself."
        )
    said.append(permutation_reason(many, ranks, max(map(len, rows))))
    said.append("Put the rows into a Dataset with a DistributedSampler, and verify can compare the script.")
    return " ".join(filter(None, said))


def _rows_of(many: Run, rank: int) -> list[tuple[str, ...]]:
    """Returns the rows that the model of ``rank`` was called with in the updates that tell."""
    found: list[tuple[str, ...]] = []
    for update in many.updates(rank):
        calls = update["forward"]
        for call in (one for one in calls if one["module"] == calls[-1]["module"]):
            leaves = [leaf["rows0"] for leaf in call["ins"] if leaf is not None and "rows0" in leaf]
            # Sums of one row may be in another order at another place of the batch.
            found += [tuple(f"{x:.6g}" for x in row) for row in zip(*leaves, strict=False)]
    return found


def error_of(run: Run, rank: int) -> str:
    """Returns the error with which a process ended, its line in the user's files, and what says more than the error.

    Raises NotComparable where it is no error of the script, and verify itself failed.
    """
    if failure := _own_failure_of(run, rank):
        raise NotComparable(failure)
    error, _, where = str(run.end(rank)["error"]).partition("\n@")
    if where:
        error += f" ({where})"
    if not error or error.startswith("SystemExit"):  # argparse and sys.exit print the reason
        error = error or (
            "it was killed, and printed last:" if run.end(rank)["how"] == "killed" and run.log(rank) else ""
        )
        error = "\n".join(filter(None, (error, run.log(rank)))) or "it ended without a word"
    return error


def gathering_reason(many: Run, numbers: Comparison) -> str:
    """Returns which call of all workers makes gradients differ where the losses do not; "" where none does."""
    first = numbers.findings[0] if numbers.findings else None
    row = next((row for row in numbers.rows if first is not None and row["step"] == first.step), None)
    if first is None or row is None or first.cause not in ("unknown", "accumulation-loss-count"):
        return ""
    one, workers = row["loss_one"], row["loss_many"]
    alike = one is not None and workers is not None and abs(one - workers) <= 1e-4 * abs(one)
    made = 0
    for document in many.records[0] if alike and first.tensor.startswith("gradient of ") else ():
        made += document["kind"] == "update"
        if document["kind"] == "collective" and document.get("gathers") and made + 1 == first.step:
            return (
                f"{document['name']} at {document['where']} exchanges rows that need gradients: at update {first.step} "
                "the loss is that of one process and the gradients are not. What the rows of the other workers add to "
                "a gradient depends on this call (torch.distributed's own pass nothing back, those of "
                "torch.distributed.nn do), and one process cannot be given it."
            )
    return ""


def no_update_reason(many: Run) -> str:
    """Returns why there is nothing to compare, with what worker 0 printed last."""
    said = many.log(0)
    return (
        "No update of an optimizer was seen that follows a pass through a torch module, within the run of the script; "
        + (f"worker 0 printed: {said}" if said else "worker 0 printed nothing.")
    )
