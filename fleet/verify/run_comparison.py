"""Runs a script on N processes and on one, and makes the report."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fleet.job.broken_exchange import lost_a_peer
from fleet.verify.data_findings import data_findings, data_notes
from fleet.verify.number_findings import Comparison, Tolerance, compare_numbers, grown_errors
from fleet.verify.paired_runs import Run, Starter, VerifyRequest, process_starter, start_run
from fleet.verify.report import Finding, Outcome, Report
from fleet.verify.waiting_findings import failed_by_itself, uneven_steps, waiting_findings
from fleet.verify.worker_findings import worker_findings

_LOCAL = {
    "localsgd": "each worker updates by itself, and the parameters are averaged every k-th step",
    "adaptive_localsgd": "each worker updates by itself, and the parameters are averaged every k-th step",
    "dgc": "only the largest gradients are exchanged",
}
_MOST_NOISE = 5e-5  # in gradients of one update: more is no rounding error
_HALF = ("amp", "fp16_allreduce", "qat")
_HALF_TYPES = ("bfloat16", "float16")


_RunAlone = Callable[[str, float, Run | None], Run]  # name of the run, noise in its gradients, what it is compared with


class _NotComparable(Exception):
    """The two runs cannot be compared; the text says why."""


def compare_runs(request: VerifyRequest, keep: Path | None = None) -> Report:
    """Returns the report on a script; the records go to ``keep``, or to a folder that is deleted again."""
    folder = Path(tempfile.mkdtemp(prefix="fleet-verify-")) if keep is None else keep
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with process_starter(folder) as start:
            return _Judge(request, folder, start).report()
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


class _Judge:
    """Makes the runs one after the other, each only where the one before leaves the question open."""

    def __init__(self, request: VerifyRequest, folder: Path, start: Starter) -> None:
        self.request, self.folder, self.start = request, folder, start
        self.notes: list[str] = []
        self.timings: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self.findings: list[Finding] = []
        self.tolerance = Tolerance(2.0**-23, "float32, the order of sums")
        self.options: dict[str, Any] = {}
        self.steps = 0

    def report(self) -> Report:
        """Returns the report; makes up to three runs."""
        began = time.perf_counter()
        try:
            self._judge()
            outcome: Outcome = "differs" if self.findings else "equal"
        except _NotComparable as reason:
            outcome = "differs" if self.findings else "not_comparable"
            self.notes.insert(0, str(reason))
        self.timings["all_s"] = time.perf_counter() - began
        tolerance = {"text": self.tolerance.why, "relative": self.tolerance.at(1, 65536)}
        return Report(
            outcome=outcome,
            steps=self.steps,
            workers=self.request.workers,
            tolerance=tolerance,
            findings=self.findings,
            notes=list(dict.fromkeys(self.notes)),
            timings=self.timings,
            options=self.options,
            per_step=self.rows,
        )

    def _judge(self) -> None:
        many = start_run(self.start, self.request, self.folder / "many", self.request.workers)
        self._note_run("workers", many)
        if many.late:
            raise _NotComparable(self._late(many))
        stopped = waiting_findings(many)
        if stopped:
            self.findings = stopped
            return
        self._need_end(many)
        job = self._job(many)
        ranks = _one_of_each_copy(many)
        self._choose_tolerance(many, job)
        self.options = _described(many.options, self.tolerance)
        sources = [many.folder / f"rank{rank}" for rank in ranks]

        def run_alone(name: str, noise: float = 0.0, beside: Run | None = None) -> Run:
            made = start_run(
                self.start, self.request, self.folder / name, 1, sources=sources, rates=_rates(many),
                synced=_synced(many, job), noise=noise, beside=beside,
            )  # fmt: skip
            self._note_run(name, made)
            return made

        one = run_alone("one_process")
        self._need_one(one)
        self._compare(many, one, ranks, job, run_alone)

    def _compare(self, many: Run, one: Run, ranks: Sequence[int], job: dict[str, Any], run_alone: _RunAlone) -> None:
        local = [name for name in _LOCAL if name in job["plan"]]
        parts = bool(job["parts"])
        found = data_findings(many, one, ranks)
        found += uneven_steps(many)
        if not found and any(not data["equal"] for data in one.of_kind(0, "data")):
            found += self._again(many)
        found += worker_findings(many, one, ranks, parts=parts, local=bool(local))
        found += _idle_options(job)
        self.notes += [note for note in job["notes"] if "changes nothing" in note]
        self.notes += data_notes(many, ranks)
        self.notes += [f"{name}: {_LOCAL[name]}. By design this differs from one process after the first update; until "
                       "then it was compared." for name in local]  # fmt: skip
        if parts and not found and "dropout" in (one.end(0).get("unequal_draws") or []):
            raise _NotComparable(
                "The model has dropout and is divided among the workers: one process cannot be given the masks of its "
                "parts. Set the rates of dropout to 0 to compare the rest."
            )
        numbers = self._compare_numbers(many, one, ranks, job, None if found else run_alone)
        self._note_equal_things(many, one, ranks)
        foreign = bool(numbers.foreign_inputs)
        if foreign and not found:
            found += self._again(many)
        seeds = [finding for finding in found if finding.cause == "dropout-seeded-alike"]
        # Equal masks make no other number wrong, so what the numbers say comes first, and is looked at in any case.
        self.findings = numbers.findings + seeds if len(seeds) == len(found) else found
        if seeds and len(self.findings) == len(seeds) and numbers.matched:
            self.notes.insert(0, f"Apart from these draws, the updates agree with one process, {self.tolerance.why}.")
        self.steps = numbers.compared
        if not self.findings and foreign:
            raise _NotComparable(
                f"The inputs of {numbers.foreign_inputs} differ between the runs: they do not come from a torch "
                "DataLoader (the script draws or reads its batches itself), and one process cannot be given what the "
                "workers had."
            )
        if not self.findings and not numbers.matched:
            raise _NotComparable(_nothing(many))

    def _compare_numbers(
        self, many: Run, one: Run, ranks: Sequence[int], job: dict[str, Any], run_alone: _RunAlone | None
    ) -> Comparison:
        """Compares the numbers; an unexplained difference is compared again with what rounding errors grow to."""
        local = any(name in job["plan"] for name in _LOCAL)
        compare = partial(compare_numbers, many, one, ranks, parts=bool(job["parts"]), only_first=local)
        numbers = compare(self.tolerance)
        if run_alone and numbers.findings and all(finding.cause == "unknown" for finding in numbers.findings):
            self._try_rounding(one, run_alone, numbers.rows)
            numbers = compare(self.tolerance)
        self.rows = numbers.rows
        if numbers.not_finite:
            steps = ", ".join(map(str, numbers.not_finite))
            self.notes.append(
                f"Gradients are NaN or infinite on the workers and in one process at update {steps}, not compared."
            )
        return numbers

    # ---- the runs ------------------------------------------------------------------------------------------------

    def _note_run(self, name: str, run: Run) -> None:
        self.timings[f"{name}_s"], self.timings[f"{name}_training_s"] = run.seconds, run.training_s
        self.notes += run.left

    def _late(self, run: Run) -> str:
        places = "; ".join(f"worker {rank} at {frames[0]}" for rank, frames in run.stacks.items() if frames)
        where = f" ({places})" if places else ""
        return f"The workers had not ended after {self.request.timeout_s:g} s{where}; --timeout gives them longer."

    def _need_end(self, many: Run) -> None:
        failed = [rank for rank in range(len(many.records)) if many.end(rank)["how"] not in ("stopped", "ended")]
        if failed:  # a worker that lost another one has nothing of its own to say
            first = [rank for rank in failed if failed_by_itself(many.end(rank))]
            first += [rank for rank in failed if not lost_a_peer(many.end(rank)["error"])]
            rank = (first or failed)[0]
            raise _NotComparable(
                f"The script does not run on {len(many.records)} workers: worker {rank}: {_error(many, rank)}"
            )
        if not many.updates(0):
            raise _NotComparable(_nothing(many))

    def _need_one(self, one: Run) -> None:
        end = one.end(0)
        if one.late or one.stuck:
            raise _NotComparable(f"The single process had not ended after {self.request.timeout_s:g} s.")
        if end["how"] in ("failed", "killed") and not one.updates(0):
            raise _NotComparable(f"The script does not run as one process: {_error(one, 0)}")

    def _job(self, many: Run) -> dict[str, Any]:
        jobs = many.of_kind(0, "job")
        return jobs[0] if jobs else {"parts": False, "notes": [], "plan": []}

    def _try_rounding(self, one: Run, run_alone: _RunAlone, rows: Sequence[dict[str, Any]]) -> None:
        """Runs the one process with a rounding error in each gradient, and allows what that makes of each update.

        Some training is ill-conditioned: batch norm over few rows at a high rate makes percents of an order of sums.
        """
        noise = self.tolerance.noise
        if rows[0]["gradients"] is not None and rows[0]["gradients"] < _MOST_NOISE:
            noise = max(noise, 2 * rows[0]["gradients"])  # the order of sums in the first gradients, as it was seen
        grown = grown_errors(one, run_alone("rounding", noise, one))
        self.tolerance = dataclasses.replace(self.tolerance, grown=grown)
        lost = next((step for step in grown if self.tolerance.is_lost(step)), None)
        if lost is None:
            return
        text = (
            f"Rounding errors grow in this training: one process whose gradients are changed by "
            f"{noise:.0e} of their norm is {grown[lost]:.1%} apart from itself at update {lost}. The "
            f"numbers of update {lost} and later ones were not compared; a lower learning rate or larger batches let "
            "more be."
        )
        if lost == min(grown):
            raise _NotComparable(text)
        self.notes.append(text)

    def _again(self, many: Run) -> list[Finding]:
        """Runs the workers once more, with the same seeds; what differs then is not seeded."""
        request = dataclasses.replace(self.request, steps=min(2, self.request.steps))
        again = start_run(self.start, request, self.folder / "again", self.request.workers)
        self._note_run("again", again)
        for rank in range(len(many.records)):
            batches = zip(many.of_kind(rank, "batch"), again.of_kind(rank, "batch"), strict=False)
            for n, (before, after) in enumerate(batches, 1):
                if before["rows"] != after["rows"]:
                    return [_unseeded(n, rank, f"the samples of its DataLoader at {before['key'].rpartition('#')[0]}")]
            for before, after in zip(many.updates(rank), again.updates(rank), strict=False):
                for mine, other in zip(before["forward"], after["forward"], strict=False):
                    if mine["ins"] != other["ins"]:
                        return [_unseeded(before["n"], rank, f"the inputs of {mine['module'] or mine['type']}")]
        return []

    # ---- what is on ----------------------------------------------------------------------------------------------

    def _choose_tolerance(self, many: Run, job: dict[str, Any]) -> None:
        formats = {
            digest["dtype"]
            for update in many.updates(0)[:1]
            for call in update["forward"]
            for digest in call["outs"]
            if digest is not None
        }
        half = [name for name in _HALF if name in job["plan"]] + [name for name in _HALF_TYPES if name in formats]
        if half:
            self.tolerance = Tolerance(2.0**-8, f"numbers of 8 or 16 bits ({', '.join(half)})")

    def _note_equal_things(self, many: Run, one: Run, ranks: Sequence[int]) -> None:
        """Adds notes on what was made comparable, and how."""
        first = many.updates(ranks[0])[0]
        if len(ranks) > 1 and any(first["modes"].values()) and not _synced(many, self._job(many)):
            self.notes.append(
                "Batch norm takes the statistics of each worker's own samples, as in torch's DistributedDataParallel; "
                "one process computed it in as many parts. sync_batch_norm makes it that of the whole batch."
            )
        pairs = zip(many.updates(ranks[0]), one.updates(0), strict=False)
        if any(ours["rates"] != alone["rates"] for ours, alone in pairs):
            self.notes.append(
                "The learning rate depends on the number of workers; one process trained with that of the workers."
            )
        unequal = one.end(0).get("unequal_draws") or []
        if unequal:
            self.notes.append(f"Random draws that differ by nature: {', '.join(dict.fromkeys(unequal))}.")
        for rank in ranks:
            self.notes += [note["text"] for note in many.of_kind(rank, "note")]


def _unseeded(step: int, rank: int, what: str) -> Finding:
    return Finding(
        cause="unseeded-randomness",
        sentence=f"Two runs with the same seeds differ in {what}: something draws from a generator that is not seeded.",
        step=step,
        rank=rank,
        tensor=what,
        expected="equal in both runs",
        received="different",
        where=what.rpartition(" at ")[2] if " at " in what else "",
    )


def _one_of_each_copy(many: Run) -> list[int]:
    """Returns the first worker of each copy of the model."""
    found: dict[Any, int] = {}
    for rank in range(len(many.records)):
        jobs = many.of_kind(rank, "job")
        data_rank = jobs[0]["data_rank"] if jobs else None
        found.setdefault(rank if data_rank is None else f"copy {data_rank}", rank)
    return list(found.values())


def _rates(many: Run) -> dict[str, list[float]]:
    return {f"{update['optimizer']}/{update['n']}": update["rates"] for update in many.updates(0)}


def _synced(many: Run, job: dict[str, Any]) -> bool:
    return "sync_batch_norm" in job["plan"]


def _idle_options(job: dict[str, Any]) -> list[Finding]:
    """Returns a finding for each strategy that is on and, by its own account, changes nothing as it is set.

    Where the reason is this machine (no GPU, one node), there is a note and no finding.
    """
    found = []
    for note in job["notes"]:
        name = note.partition(" ")[0]
        if name in job["plan"] and "changes nothing" in note and f"{name}_configs" in note:
            found.append(Finding(cause="option-changed-nothing", sentence=note, step=0, tensor=name))
    return found


def _described(options: dict[str, Any], tolerance: Tolerance) -> dict[str, Any]:
    made = {}
    for name in options:
        if name in _LOCAL:
            made[name] = {"tolerance": "differs by design", "why": _LOCAL[name]}
        elif name in _HALF:
            made[name] = {"tolerance": "16 bit", "why": "numbers are rounded to 16 bits or fewer"}
        else:
            made[name] = {"tolerance": "order of sums", "why": tolerance.why}
    return made


def _error(run: Run, rank: int) -> str:
    """Returns the error with which a process ended, its line in the user's files, and what says more than the error."""
    error, _, where = str(run.end(rank)["error"]).partition("\n@")
    if where:
        error += f" ({where})"
    if not error or error.startswith("SystemExit"):  # argparse and sys.exit print the reason
        error = "\n".join(filter(None, (error, run.log(rank)))) or "it ended without a word"
    return error


def _nothing(many: Run) -> str:
    said = many.log(0)
    return (
        "No update of an optimizer was seen that follows a pass through a torch module, within the run of the script; "
        + (f"worker 0 printed: {said}" if said else "worker 0 printed nothing.")
    )
