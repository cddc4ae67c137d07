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
from fleet.verify.bits.bit_findings import compare_bits
from fleet.verify.data_findings import data_findings, data_notes, have_same_inputs
from fleet.verify.hand_division import HandDivision, hand_division, mark_parts
from fleet.verify.incomparable_runs import (
    DIVIDED_DROPOUT,
    NotComparable,
    error_of,
    foreign_inputs_reason,
    gathering_reason,
    no_update_reason,
    places,
    unequal_draws_reason,
    unseen_draws_reason,
)
from fleet.verify.number_findings import Comparison, Tolerance, compare_numbers, grown_errors
from fleet.verify.paired_runs import Run, Starter, VerifyRequest, process_starter, start_run
from fleet.verify.report import HALF, LOCAL, Finding, Outcome, Report, described_options
from fleet.verify.user_lines import with_line
from fleet.verify.waiting_findings import failed_by_itself, uneven_steps, waiting_findings
from fleet.verify.worker_findings import idle_options, worker_findings

_MOST_NOISE = 5e-5  # in gradients of one update: more is no rounding error
_HALF_TYPES = ("bfloat16", "float16")


_AGAIN = {
    "one_copy": " again, with the samples of one worker, as the workers make up one model",
    "one_alike": " again, with worker 0's single numbers",
    "in_turn": " again, with the workers' batches one after the other",
    "rounding": " again, with rounding errors in its gradients",
}  # what a further run is for

_RunAlone = Callable[[str, float, Run | None], Run]  # name of the run, noise in its gradients, what it is compared with


def compare_runs(
    request: VerifyRequest, keep: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Report:
    """Returns the report on a script; the records go to ``keep``, or to a folder that is deleted again.

    ``say`` is told of each run that begins.
    """
    folder = Path(tempfile.mkdtemp(prefix="fleet-verify-")) if keep is None else keep
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with process_starter(folder) as start:
            return _Judge(request, folder, start, say).report()
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


class _Judge:
    """Makes the runs one after the other, each only where the one before leaves the question open."""

    def __init__(
        self, request: VerifyRequest, folder: Path, start: Starter, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.request = request
        self.folder = folder
        self.start = start
        self._say = say
        self.notes: list[str] = []
        self.timings: dict[str, float] = {}
        self.rows: list[dict[str, Any]] = []
        self.first: list[dict[str, Any]] = []
        self.findings: list[Finding] = []
        self.warnings: list[Finding] = []
        self.tolerance = Tolerance(2.0**-23, "float32, the order of sums")
        self.options: dict[str, Any] = {}
        self.steps = 0
        self._alike: Run | None = None  # whose single numbers all workers were given

    def report(self) -> Report:
        """Returns the report; makes up to three runs."""
        began = time.perf_counter()
        try:
            self._judge()
            outcome: Outcome = "differs" if self.findings else "equal"
        except NotComparable as reason:
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
            warnings=self.warnings,
            notes=list(dict.fromkeys(self.notes)),
            timings=self.timings,
            options=self.options,
            per_step=self.rows,
            first=self.first if self.findings and self.findings[0].tensor.startswith("gradient of ") else [],
        )

    def _judge(self) -> None:
        many = self._run_workers("workers")
        if self.findings:
            return
        job = self._job(many)
        self._need_job(job)
        if job.get("logical"):
            self._compare_bits(many, job)
            return
        ranks = _one_of_each_copy(many)
        self._choose_tolerance(many, job)
        self.options = described_options(many.options, self.tolerance.why)
        one = self._run_alone(many, "one_process")
        self._need_one(one, job)
        if one.end(0).get("own_numbers"):
            many = self._run_alike(many, one, ranks)
            one = self._run_alone(many, "one_alike")
            self._need_one(one, job)
        division = None
        if not job["parts"] and job["engine"] != "fleet" and len(ranks) > 1:  # Fleet's options divide, and say so
            division = hand_division(many, one, ranks)
        if division is not None:
            self._compare_divided(many, one, ranks, job, division)
            return
        in_turn = not job["parts"] and _takes_turns(many, one, ranks)  # stages count passes of their own
        if in_turn:
            one = self._run_alone(many, "in_turn", in_turn=True)
            self._need_one(one, job)
            self.notes.append(
                f"One process takes {len(ranks)} times as many batches for an update as each worker; it was given the "
                "batches and draws of the workers one after the other."
            )
        self._compare(many, one, ranks, job, partial(self._run_alone, many, in_turn=in_turn))

    def _compare_bits(self, many: Run, job: dict[str, Any]) -> None:
        """Compares a reproducible job with the same script in one process, which is given nothing of the workers."""
        hosted = f"one process that hosts all {job['logical']} logical workers"
        self.tolerance = Tolerance(0.0, f"tolerance 0: the bits are compared with those of {hosted}")
        self.options = dict.fromkeys(many.options, {"tolerance": "0", "why": self.tolerance.why})
        self._say(f"{hosted} trains")
        one = start_run(self.start, self.request, self.folder / "one_process", 1)
        self._note_run("one_process", one)
        self._need_one(one, job, least=self.request.steps)
        ranks = range(len(many.records))
        found = worker_findings(many, one, ranks, parts=False, local=False) + idle_options(job)
        seeds = [finding for finding in found if finding.cause == "dropout-seeded-alike"]
        found = [finding for finding in found if finding not in seeds]
        numbers = compare_bits(many, one)
        if not found and any(finding.tensor == "input" for finding in numbers.findings):
            found = self._again(many)
        self.rows = numbers.rows
        self.steps = numbers.compared
        self.warnings = [with_line(finding, many, ranks) for finding in seeds]
        self.findings = [with_line(finding, many, ranks) for finding in found or numbers.findings]
        if not self.findings and not numbers.matched:
            raise NotComparable(no_update_reason(many))

    def _compare_divided(
        self, many: Run, one: Run, ranks: Sequence[int], job: dict[str, Any], division: HandDivision
    ) -> None:
        """Compares a model that the script divides by hand: losses, gradients and parameters, of parts their norms."""
        run_alone = self._run_alone
        if division.is_one_copy:
            run_alone = partial(run_alone, ranks=ranks[:1])
            one = run_alone(many, "one_copy")
            self._need_one(one, job)
        mark_parts(many, one, division)
        parts = ", ".join(sorted(division.parts | division.elsewhere)[:4])
        self.notes.append(
            f"The script divides the model among the workers by hand ({parts or 'each has modules of its own'}): its "
            "modules are not compared, and of what each worker has a part of, the norm is."
        )
        self._compare(many, one, ranks, job, partial(run_alone, many), division)

    def _run_workers(self, name: str, alike: Run | None = None) -> Run:
        """Returns a run of the workers that came to its end; where it did not, there are findings."""
        folder = self.folder / ("many" if alike is None else name)
        again = "" if alike is None else " again, with worker 0's single numbers"
        self._say(f"{self.request.workers} workers train{again}")
        many = start_run(self.start, self.request, folder, self.request.workers, alike=alike)
        self._note_run(name, many)
        if many.late:
            raise NotComparable(self._late(many))
        self.findings = waiting_findings(many)
        if not self.findings:
            self._need_end(many)
        return many

    def _run_alike(self, many: Run, one: Run, ranks: Sequence[int]) -> Run:
        """Returns a run in which all workers draw worker 0's single numbers, of which one process has one as well."""
        names = ", ".join(dict.fromkeys(one.end(0)["own_numbers"]))
        self._alike = many
        made = self._run_workers("alike", many)
        if self.findings or (have_same_inputs(made, ranks) and not have_same_inputs(many, ranks)):
            self.findings = []
            raise NotComparable(
                f"Each worker draws single numbers of its own with {names}, which choose its batches: one process "
                "cannot be given what the workers had. Draw all numbers of a batch in one call, or use a DataLoader."
            )
        self.notes.append(
            f"Each worker draws single numbers of its own with {names}; for the comparison all were given worker 0's."
        )
        return made

    def _run_alone(
        self,
        many: Run,
        name: str,
        noise: float = 0.0,
        beside: Run | None = None,
        *,
        in_turn: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> Run:
        """Returns a run of one process, which is given what ``ranks`` had; None: one worker of each copy."""
        self._say(f"one process trains{_AGAIN.get(name, '')}")
        made = start_run(
            self.start, self.request, self.folder / name, 1,
            sources=[many.folder / f"rank{rank}" for rank in ranks or _one_of_each_copy(many)],
            scheduled=_scheduled(many), synced=_synced(many, self._job(many)),
            noise=noise, beside=beside, in_turn=in_turn,
        )  # fmt: skip
        self._note_run(name, made)
        return made

    def _compare(
        self,
        many: Run,
        one: Run,
        ranks: Sequence[int],
        job: dict[str, Any],
        run_alone: _RunAlone,
        division: HandDivision | None = None,
    ) -> None:
        local = [name for name in LOCAL if name in job["plan"]]
        parts = bool(job["parts"])
        readers = ranks[:1] if division is not None and division.is_one_copy else ranks
        found = data_findings(many, one, readers)
        found += uneven_steps(many)
        if not found and any(not data["equal"] for data in one.of_kind(0, "data")):
            found += self._again(many)
        found += worker_findings(many, one, ranks, parts=parts, local=bool(local), readers=len(readers))
        found += idle_options(job)
        self.notes += [note for note in job["notes"] if "changes nothing" in note]
        self.notes += data_notes(many, ranks)
        self.notes += [f"{name}: {LOCAL[name]}. By design this differs from one process after the first update; until "
                       "then it was compared." for name in local]  # fmt: skip
        if (parts or division) and not found and "dropout" in (one.end(0).get("unequal_draws") or []):
            raise NotComparable(DIVIDED_DROPOUT)
        # Equal masks make no number wrong: the mean of the gradients stays what it is, and only varies more.
        seeds = [finding for finding in found if finding.cause == "dropout-seeded-alike"]
        found = [finding for finding in found if finding not in seeds]
        numbers = self._compare_numbers(many, one, ranks, job, None if found else run_alone, division)
        self._note_equal_things(many, one, ranks)
        foreign = bool(numbers.foreign_inputs)
        if foreign and not found:
            found += self._again(many)
        if job.get("seeded_by"):  # no mistake of the script
            self.notes += [f"{job['seeded_by']} seeds the workers alike. {finding.sentence}" for finding in seeds]
            seeds = []
        self.warnings = [with_line(finding, many, ranks) for finding in seeds]
        self.findings = [with_line(finding, many, ranks) for finding in found or numbers.findings]
        self.steps = numbers.compared
        self._need_comparable(many, one, numbers, is_explained=bool(found))

    def _need_comparable(self, many: Run, one: Run, numbers: Comparison, is_explained: bool) -> None:
        """Raises NotComparable where the numbers could not be alike; then a difference of theirs is no finding."""
        call = gathering_reason(many, numbers)
        if call and not is_explained:
            self.findings = []
            raise NotComparable(call)
        masks = unequal_draws_reason(one, self.findings) or unseen_draws_reason(many, one, self.findings)
        if masks and not is_explained:
            self.findings = []
            raise NotComparable(masks)
        unexplained = [finding for finding in self.findings if finding.cause == "unknown"]
        others = any(finding.tensor == "output" for finding in unexplained)
        if one.of_kind(0, "padded") and unexplained and (others or unexplained == self.findings):
            self.findings = []
            raise NotComparable(
                "Each worker pads its batches to its own longest sample and one process to the longest of all, and "
                "what the model makes of a sample depends on how far it is padded. Mask the padding in the model, or "
                "pad all batches to one length, to compare them."
            )
        if not self.findings and numbers.foreign_inputs:
            raise NotComparable(foreign_inputs_reason(many, _one_of_each_copy(many), numbers.foreign_inputs))
        if not self.findings and not numbers.matched:
            raise NotComparable(no_update_reason(many))

    def _compare_numbers(
        self,
        many: Run,
        one: Run,
        ranks: Sequence[int],
        job: dict[str, Any],
        run_alone: _RunAlone | None,
        division: HandDivision | None,
    ) -> Comparison:
        """Compares the numbers; what may be rounding errors is compared again with what those grow to."""
        local = any(name in job["plan"] for name in LOCAL)
        divided = None if division is None else division.parts
        compare = partial(
            compare_numbers, many, one, ranks, parts=bool(job["parts"]), only_first=local, divided=divided
        )
        numbers = compare(self.tolerance)
        if run_alone and numbers.findings and all(map(_could_be_rounding, numbers.findings)):
            self._try_rounding(one, run_alone, numbers.rows)
            numbers = compare(self.tolerance)
        self.rows = numbers.rows
        self.first = numbers.first
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
        where = f" ({places(run)})" if run.stacks else ""
        return f"The workers had not ended after {self.request.timeout_s:g} s{where}; --timeout gives them longer."

    def _need_end(self, many: Run) -> None:
        failed = [rank for rank in range(len(many.records)) if many.end(rank)["how"] not in ("stopped", "ended")]
        if many.stuck:
            raise NotComparable(f"The script does not run on {len(many.records)} workers, which wait: {places(many)}.")
        if failed:  # a worker that lost another one has nothing of its own to say
            first = [rank for rank in failed if failed_by_itself(many.end(rank))]
            first += [rank for rank in failed if not lost_a_peer(many.end(rank)["error"])]
            rank = (first or failed)[0]
            raise NotComparable(
                f"The script does not run on {len(many.records)} workers: worker {rank}: {error_of(many, rank)}"
            )
        if not many.updates(0):
            raise NotComparable(no_update_reason(many))

    def _need_job(self, job: dict[str, Any]) -> None:
        if not job["engine"]:
            raise NotComparable(
                "The workers form no job: before it trains, the script calls neither fleet.init() nor "
                "torch.distributed.init_process_group(), so each process trains by itself. `python -m fleet migrate` "
                "shows what to change."
            )
        if self.request.strategy and job["engine"] != "fleet":
            raise NotComparable(
                "--strategy changes what fleet.init() starts, and the script trains without a call of fleet.init(). "
                "Leave --strategy out to compare the script as it is."
            )

    def _need_one(self, one: Run, job: dict[str, Any], least: int = 1) -> None:
        end = one.end(0)
        if one.late or one.stuck:
            raise NotComparable(f"The single process had not ended after {self.request.timeout_s:g} s.")
        if end["how"] in ("failed", "killed") and len(one.updates(0)) < least:
            raise NotComparable(f"The script does not run as one process: {error_of(one, 0)}")
        if job["computing"] and self._job(one)["engine"] != job["engine"]:
            raise NotComparable(
                "One process does not call fleet.init(), such as behind `if distributed:`, and trains without "
                f"{', '.join(job['computing'])}. Call it in every process to compare what these options compute."
            )

    def _job(self, run: Run) -> dict[str, Any]:
        jobs = run.of_kind(0, "job")
        return jobs[0] if jobs else {"engine": "", "parts": False, "notes": [], "plan": [], "computing": []}

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
            raise NotComparable(text)
        self.notes.append(text)

    def _again(self, many: Run) -> list[Finding]:
        """Runs the workers once more, with the same seeds; what differs then is not seeded."""
        folder = self.folder / "again"
        if folder.exists():  # looked at already, and found seeded
            return []
        self._say("the workers train again: are they seeded?")
        request = dataclasses.replace(self.request, steps=min(2, self.request.steps))
        again = start_run(self.start, request, folder, self.request.workers, alike=self._alike)
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
        half = [name for name in HALF if name in job["plan"]] + [name for name in _HALF_TYPES if name in formats]
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


def _could_be_rounding(finding: Finding) -> bool:
    """Returns whether nothing but the size of a difference speaks for a mistake of the script.

    The kind of a module names a cause, too, and says no more than the outputs do: after an update they hold whatever
    rounding errors in its gradients have grown to.
    """
    return finding.cause == "unknown" or (finding.tensor == "output" and finding.step != 1)


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


def _scheduled(many: Run) -> dict[str, list[dict[str, Any]]]:
    return {f"{update['optimizer']}/{update['n']}": update["scheduled"] for update in many.updates(0)}


def _synced(many: Run, job: dict[str, Any]) -> bool:
    """Returns whether batch norm is that of the whole batch; a guard may leave one process a plain one."""
    first = many.updates(0)[:1]
    kinds = {call["type"] for update in first for call in update["forward"]}
    by_itself = any(update["synced"] for update in first)  # a layer of the script's own
    return "sync_batch_norm" in job["plan"] or "SyncBatchNorm" in kinds or by_itself


def _takes_turns(many: Run, one: Run, ranks: Sequence[int]) -> bool:
    """Returns whether one process makes as many backward passes for an update as all workers together."""
    ours, alone = ([update["backwards"] for update in run.updates(0)[:1]] for run in (many, one))
    return len(ranks) > 1 and bool(ours and alone) and ours[0] > 0 and alone[0] == len(ranks) * ours[0]
