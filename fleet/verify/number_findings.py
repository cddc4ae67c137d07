"""The numbers of N workers beside those of one process: modules, losses, gradients, parameters, optimizer states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.verify.gradient_causes import Pair, cause_after_backward, cause_of_factor
from fleet.verify.paired_runs import Run
from fleet.verify.record_files import read_record
from fleet.verify.report import Finding

_ADAPTIVE = ("adam", "lamb", "rms", "adagrad", "adadelta", "rprop", "lion", "adafactor", "muon")
_GROWN = 10.0  # times what a rounding error grew to in one trial: the next may grow to several times as much
_LOST = 0.02
_NEAR_LOSSES = 84  # times eps: 1e-5 in float32
_SMALL = 1e-2  # of the largest gradient: below that a gradient is rounding errors of larger ones


@dataclass(frozen=True)
class Tolerance:
    """The largest relative difference that the order of sums and the number formats explain.

    ``eps`` is the spacing of the coarsest format that takes part; ``why`` says which and why. ``grown`` has, for each
    update, how far apart one process is from itself when each gradient is changed by ``noise``, where that was tried;
    an update at which it is above ``_LOST`` is not compared.
    """

    eps: float
    why: str
    grown: Mapping[int, float] = field(default_factory=dict)

    @property
    def noise(self) -> float:
        """The relative size of rounding errors in a sum or product of this format."""
        return self.eps if self.eps > 1e-4 else 8 * self.eps

    def at(self, step: int, elements: int) -> float:
        """Returns the limit after ``step`` updates for a tensor of ``elements`` numbers."""
        grown = _GROWN * self.grown.get(step, 0.0)
        if self.eps > 1e-4:
            return max(grown, min(0.5, 8 * self.eps * step))
        return max(grown, float(64 * self.eps * max(elements, 256) ** 0.5 * step))

    def is_lost(self, step: int) -> bool:
        """Returns whether rounding errors alone make the numbers of an update differ visibly."""
        return self.grown.get(step, 0.0) > _LOST


class _Unlimited(Tolerance):
    """No difference is too large: the rows say how large they are."""

    def at(self, step: int, elements: int) -> float:
        return float("inf")


@dataclass
class Comparison:
    """What was compared: findings in order, a row for each update, and whether anything was compared at all."""

    findings: list[Finding] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    first: list[dict[str, Any]] = field(default_factory=list)  # the tensors that the first difference was among
    compared: int = 0
    matched: int = 0  # gradients, losses and parameters that were laid beside each other
    foreign_inputs: str = ""
    not_finite: list[int] = field(default_factory=list)  # updates with NaN or infinite gradients in both runs


def compare_numbers(
    many: Run,
    one: Run,
    ranks: Sequence[int],
    tolerance: Tolerance,
    *,
    parts: bool,
    only_first: bool,
    divided: frozenset[str] | None = None,
) -> Comparison:
    """Compares each update of ``ranks``, one worker of each copy of the model, with that of one process.

    ``parts`` says that the workers hold parts of the model: then losses and whole parameters are compared.
    ``only_first`` ends the comparison with the gradients of the first update. ``divided`` are the tensors that the
    script divides by hand: of each the norm is compared, and of the modules the calls of whole models.
    """
    made, rate, ties = Comparison(), 0.0, _ties(one)
    alone = {(u["optimizer"], u["n"]): u for u in one.updates(0)}
    for updates in zip(*(many.updates(rank) for rank in ranks), strict=False):
        first = updates[0]
        if (other := alone.get((first["optimizer"], first["n"]))) is None:
            continue
        rate += max(first["rates"], default=0.0)
        step = _Step(list(updates), other, ranks, tolerance, first["n"], rate, ties, divided)
        row = step.row()
        made.rows.append(row)
        if step.not_finite():
            made.not_finite.append(first["n"])
            continue
        if tolerance.is_lost(first["n"]):
            continue
        made.compared += 1
        if made.findings or (only_first and first["n"] > 1):
            continue
        found = [] if parts else [*step.forward(made)]
        if made.foreign_inputs:
            return made
        found += step.loss(row) if parts or divided is not None else []
        if not parts:
            found += step.gradients(row, made, outputs_agree=not found)
        if not only_first and not found:
            found += step.parameters(row)
            found += step.states() if not parts and not found else []
        made.matched += sum(row[name] is not None for name in ("gradients", "parameters"))
        made.findings += _one_cause(found)
    return made


def _ties(one: Run) -> list[list[str]]:
    """Returns the names of each parameter that has several, in one process."""
    return [
        [f"{start['model']}{name}" for name in names] for start in one.of_kind(0, "start") for names in start["ties"]
    ]


def grown_errors(one: Run, tried: Run) -> dict[int, float]:
    """Returns how far apart two runs of one process are at each update, relative, or were at an earlier one.

    Updates that ``tried`` no longer made, because all was lost, count as lost.
    """
    rows = compare_numbers(tried, one, [0], _Unlimited(0.0, ""), parts=False, only_first=False).rows
    found, largest = {}, 0.0
    # What a rounding error makes of Adam's parameters is within the learning rate, and allowed in any case.
    kept = (
        ("outputs", "gradients") if any(map(_is_adaptive, one.updates(0))) else ("outputs", "gradients", "parameters")
    )
    for row in rows:
        values = [row[name] for name in kept if row[name] is not None]
        largest = max([largest, *(value if value == value else float("inf") for value in values)])
        found[row["step"]] = largest
    for update in one.updates(0) if largest > _LOST else ():
        found.setdefault(update["n"], largest)
    return found


def _is_adaptive(update: dict[str, Any]) -> bool:
    return any(word in update.get("kind_of", "").lower() for word in _ADAPTIVE)


def until_lost(other: Path) -> Callable[[dict[str, Any]], bool]:
    """Returns whether an update is so far from the same one of a run whose record is in ``other`` that all is lost."""
    one = Run(folder=other, records=[read_record(other, "update")])

    def is_lost(update: dict[str, Any]) -> bool:
        return any(apart > _LOST for apart in grown_errors(one, Run(folder=other, records=[[update]])).values())

    return is_lost


def _one_cause(found: Sequence[Finding]) -> list[Finding]:
    """Returns the findings of one step: what names a cause, else the first difference."""
    known = [one for one in found if one.cause != "unknown"]
    return known[:1] + [one for one in found if one not in known][:3] if known else list(found[:4])


@dataclass
class _Step:
    """One update of the workers, and the same one of one process."""

    ours: list[dict[str, Any]]
    alone: dict[str, Any]
    ranks: Sequence[int]
    tolerance: Tolerance
    n: int
    rate: float  # the learning rates of all updates so far, added up
    ties: Sequence[Sequence[str]] = ()  # names of parameters that are one
    divided: frozenset[str] | None = None  # tensors that a script divides by hand; None: it does not divide its model

    def row(self) -> dict[str, Any]:
        ours = [update["losses"][-1] for update in self.ours if update["losses"]]
        mine = self.alone["losses"]
        return {
            "step": self.n,
            "loss_one": mine[-1] if mine else None,
            "loss_many": sum(ours) / len(ours) if ours else None,
            "outputs": None,
            "gradients": None,
            "parameters": None,
        }

    def not_finite(self) -> bool:
        """Returns whether some gradient is not finite on the workers, and the same in one process."""
        for name, expected in self.alone["gradients"].items():
            got = whole([update["gradients"].get(name) for update in self.ours])
            if got is not None and not math.isfinite(expected["s"]):
                return not math.isfinite(got["s"])
        return False

    # ---- modules -------------------------------------------------------------------------------------------------

    def forward(self, made: Comparison) -> Iterator[Finding]:
        """Yields the first module whose inputs agree and whose outputs do not."""
        row = made.rows[-1]
        calls = [self._calls(update) for update in self.ours]
        alone = self._calls(self.alone)
        if len({len(own) for own in calls}) != 1 or len(calls[0]) != len(alone):
            if self.n == 1 and self._inputs_differ(calls):
                made.foreign_inputs = alone[-1]["module"] or alone[-1]["type"]
            return
        roots_seen = False
        for i, other in enumerate(alone):
            own = [called[i] for called in calls]
            if any(one["module"] != other["module"] for one in own):
                return
            ins = _apart([one["ins"] for one in own], other["ins"])
            limit = self.tolerance.at(self.n, _elements(other["outs"]))
            unlike = (
                ins > max(limit, 1e-5) if ins is not None else _are_others([one["ins"] for one in own], other["ins"])
            )
            if self.n == 1 and not roots_seen and unlike:
                made.foreign_inputs = other["module"] or other["type"]
                return
            roots_seen = True
            outs = _apart([one["outs"] for one in own], other["outs"])
            if outs is None:
                continue
            row["outputs"] = max(row["outputs"] or 0.0, outs)
            if not outs <= limit:
                yield self._outputs_apart(own, other, outs)
                return

    def _outputs_apart(self, own: Sequence[dict[str, Any]], other: dict[str, Any], outs: float) -> Finding:
        """Returns the finding that a module gives other outputs for the same inputs."""
        cause, why = self._why_output(other["module"])
        name = other["module"] or other["type"]
        return Finding(
            cause=cause,
            sentence=f"{name} ({other['type']}) gives other outputs on the workers than in one process for the same "
            f"samples, at update {self.n}{why}.",
            step=self.n,
            module=other["module"],
            tensor="output",
            expected=_size([other["outs"]]),
            received=_size([one["outs"] for one in own]),
            difference=outs,
        )

    def _calls(self, update: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the calls of modules that one process makes as well."""
        if self.divided is None:
            return list(update["forward"])
        return [call for call in update["forward"] if not call["module"].rpartition(": ")[2]]

    def _why_output(self, module: str) -> tuple[str, str]:
        """Returns the cause and the end of a sentence for the first module whose outputs differ, though its inputs
        and, as far as optimizers know, its parameters agree."""
        if module in self.alone.get("modes", {}):
            return "batchnorm-statistics", ": it normalizes by statistics that are not those of these samples"
        tied = [names for names in self.ties if any(name.rpartition(".")[0] == module for name in names)]
        if tied:
            return (
                "tied-weights-apart",
                f". {' and '.join(tied[0])} are one parameter, which is updated as in one process: the module computes "
                "with values of its own, which nothing updates. Tie the weights before the model is wrapped or "
                "sharded, and shard what shares them in one group",
            )
        return "unknown", ""

    def _inputs_differ(self, calls: Sequence[Sequence[dict[str, Any]]]) -> bool:
        """Returns whether the models had other rows on the workers than in one process, which took more batches."""
        last = [own[-1]["module"] for own in (*calls, self.alone["forward"]) if own]  # a model's own call ends it
        if len(last) < len(calls) + 1 or len(set(last)) > 1:
            return False
        together = [one for own in calls for one in own]
        sums = [_input_sums(group, last[0]) for group in (together, self.alone["forward"])]
        return any(abs(a - b) > 1e-4 * max(abs(a), abs(b), 1.0) for a, b in zip(*sums, strict=False))

    def loss(self, row: dict[str, Any]) -> Iterator[Finding]:
        """Yields a finding where the mean loss of the workers is not that of one process."""
        one, many = row["loss_one"], row["loss_many"]
        if one is None or many is None or self._close(one, many):
            return
        yield Finding(
            cause="unknown",
            sentence=f"The loss of update {self.n} is {many:.6g} on the workers and {one:.6g} in one process.",
            step=self.n,
            tensor="loss",
            expected=one,
            received=many,
            difference=abs(one - many) / max(abs(one), 1e-12),
        )

    # ---- gradients -----------------------------------------------------------------------------------------------

    def gradients(self, row: dict[str, Any], made: Comparison, *, outputs_agree: bool) -> Iterator[Finding]:
        """Yields findings where the gradients of the update are not those of one process."""
        pairs = list(self._pairs("gradients"))
        largest = max((g["s"] ** 0.5 for _, g, _ in pairs), default=0.0)
        wrong = []
        for name, expected, got in pairs:
            apart = relative(got, expected, largest)
            row["gradients"] = max(row["gradients"] or 0.0, apart)
            limit = self.tolerance.at(self.n, expected["n"])
            if not apart <= max(limit, 5e-5 * self.n):
                wrong.append((name, expected, got))
        if not wrong:
            return
        made.first = [_norms(name, expected, got) for name, expected, got in pairs]
        name, expected, got = wrong[0]
        apart = relative(got, expected, largest)
        cause, sentence = self._why(wrong, pairs, outputs_agree=outputs_agree)
        yield self._tensor_apart(cause, sentence, f"gradient of {name}", expected, got, apart, name.rpartition(".")[0])

    def _why(self, wrong: Sequence[Pair], pairs: Sequence[Pair], *, outputs_agree: bool) -> tuple[str, str]:
        """Returns the cause and the sentence of ``wrong`` gradients, of the ``pairs`` that were compared."""
        workers = len(self.ours)
        if self._back_agrees():
            return cause_after_backward(wrong, pairs, [update["back"] for update in self.ours], self.n)
        cause = cause_of_factor(wrong, pairs, workers, self.alone["nodes"])
        if cause[0]:
            return cause
        name = wrong[0][0]
        # A loss is to blame only where what it was computed from is the same in both runs.
        if outputs_agree:
            return self._why_loss(name)
        return "unknown", f"The gradient of {name} is not that of one process at update {self.n}."

    def _why_loss(self, name: str) -> tuple[str, str]:
        """Returns the cause of gradients that differ by no factor: the loss, where the losses differ as well."""
        for one, many in self._losses():
            # Counts of about one size move a mean by little, and update 1 begins with the same weights.
            apart = abs(one - many) / max(abs(one), abs(many), 1e-12)
            if self._close(one, many, 256) and (self.n > 1 or apart <= _NEAR_LOSSES * self.tolerance.eps):
                continue
            return (
                "loss-over-own-batch",
                f"The mean of the workers' losses at update {self.n} is {many:.6g}, and the loss of one process on the "
                f"same samples and the same outputs is {one:.6g}: the loss is no mean over samples. It divides by a "
                "count of this worker's own (ignore_index, class weights, a mask), or it compares the samples of a "
                "batch with each other. In a job of fleet, write loss = fleet.mean(total, count); elsewhere, divide by "
                "the all-reduced count of all workers and multiply by their number.",
            )
        return "unknown", f"The gradient of {name} is not that of one process at update {self.n}."

    def _losses(self) -> list[tuple[float, float]]:
        """Returns the loss of each batch of the update in one process, with the mean of the workers'."""
        groups = [update["losses"] for update in (self.alone, *self.ours)]
        if len({len(losses) for losses in groups}) > 1:  # one process took the same samples in more batches
            groups = [[sum(losses) / len(losses)] if losses else [] for losses in groups]
        return [(one, sum(many) / len(many)) for one, *many in zip(*groups, strict=False)]

    def _close(self, one: float, many: float, elements: int = 65536) -> bool:
        """Returns whether two losses agree, which are means over about as many ``elements``."""
        return abs(one - many) <= self.tolerance.at(self.n, elements) * max(abs(one), 1e-6)

    def _back_agrees(self) -> bool:
        """Returns whether the gradients agreed right after the backward pass."""
        pairs = list(self._pairs("back"))
        for _, expected, got in pairs:
            limit = max(self.tolerance.at(self.n, expected["n"]), 5e-5 * self.n)
            if not abs(got["p"] - expected["p"]) <= limit * max(expected["s"] ** 0.5, 1e-12):
                return False
        return bool(pairs) and len(pairs) == len(self.alone["back"])

    def _pairs(self, kind: str) -> Iterator[Pair]:
        """Yields the tensors of ``kind`` that both runs have: name, digest in one process, on the workers."""
        for name, expected in self.alone[kind].items():
            got = whole([update[kind].get(name) for update in self.ours])
            if got is not None and name.partition(" ")[0] in (self.divided or ()):
                # Where the parts lie in the whole is not known, so no projection of them is.
                yield name, {**expected, "p": expected["s"] ** 0.5}, {**got, "p": got["s"] ** 0.5}
            elif got is not None:
                yield name, expected, got

    # ---- after the update ----------------------------------------------------------------------------------------

    def parameters(self, row: dict[str, Any]) -> Iterator[Finding]:
        """Yields the parameter that is furthest from that of one process, where that is too far."""
        worst: tuple[float, str, dict[str, Any], dict[str, Any]] | None = None
        adaptive = _is_adaptive(self.alone)
        for name, expected, got in self._pairs("parameters"):
            size = max(expected["s"] ** 0.5, 1e-12)
            apart = abs(got["p"] - expected["p"])
            row["parameters"] = max(row["parameters"] or 0.0, apart / size)
            limit = max(self.tolerance.at(self.n, expected["n"]), 5e-5 * self.n) * max(size, self.rate)
            if adaptive:  # the sign of a rounding error moves a parameter by the learning rate
                limit = max(limit, 2.5 * self.rate * expected["n"] ** 0.5)
            if not apart <= limit and (worst is None or apart / size > worst[0]):
                worst = (apart / size, name, expected, got)
        if worst is not None:
            apart, name, expected, got = worst
            sentence = f"{name} is not that of one process after update {self.n}, though the gradients were."
            yield self._tensor_apart("unknown", sentence, name, expected, got, apart, name.rpartition(".")[0])

    def states(self) -> Iterator[Finding]:
        """Yields the first optimizer state that is not that of one process."""
        sizes = [value["s"] ** 0.5 for value in self.alone["states"].values()]
        largest = max(sizes, default=0.0)
        for name, expected, got in self._pairs("states"):
            parameter, _, key = name.rpartition(" ")
            size = max(expected["s"] ** 0.5, _SMALL * largest, 1e-30)
            apart = abs(got["p"] - expected["p"]) / size
            if not apart <= 4 * max(self.tolerance.at(self.n, expected["n"]), 5e-5 * self.n):
                sentence = f"The optimizer's {key} of {parameter} is not that of one process after update {self.n}."
                yield self._tensor_apart("unknown", sentence, name, expected, got, apart)
                return

    def _tensor_apart(
        self,
        cause: str,
        sentence: str,
        tensor: str,
        expected: dict[str, Any],
        got: dict[str, Any],
        apart: float,
        module: str = "",
    ) -> Finding:
        """Returns the finding that a tensor of the workers is not the same in one process."""
        return Finding(
            cause=cause,
            sentence=sentence,
            step=self.n,
            module=module,
            tensor=tensor,
            expected=expected["s"] ** 0.5,
            received=got["s"] ** 0.5,
            difference=apart,
        )


def whole(digests: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Returns the digest of the whole tensor: the mean over copies, the sum over different shards."""
    given = [digest for digest in digests if digest is not None]
    if not given:
        return None
    by_part: dict[str, list[dict[str, Any]]] = {}
    for digest in given:
        by_part.setdefault(digest["part"], []).append(digest)
    means = [
        {key: sum(d[key] for d in group) / len(group) for key in ("p", "s", "n")} for group in by_part.values()
    ]  # fmt: skip
    return {key: sum(mean[key] for mean in means) for key in ("p", "s", "n")}


def relative(got: Mapping[str, Any], expected: Mapping[str, Any], largest: float = 0.0) -> float:
    """Returns how far a gradient is from that of one process, whose ``largest`` bounds what it is relative to."""
    return float(abs(got["p"] - expected["p"]) / max(expected["s"] ** 0.5, _SMALL * largest, 1e-30))


def _norms(name: str, expected: dict[str, Any], got: dict[str, Any]) -> dict[str, Any]:
    return {"tensor": name, "expected": expected["s"] ** 0.5, "received": got["s"] ** 0.5}


def _input_sums(calls: Sequence[dict[str, Any]], module: str) -> list[float]:
    """Returns, for each input of a module, the sum over its rows of all calls."""
    own = [call["ins"] for call in calls if call["module"] == module]
    tensors = zip(*own, strict=False)
    return [sum(one["total0"] for one in group) for group in tensors if all(one and one["shape"] for one in group)]


def _elements(outs: Sequence[dict[str, Any] | None]) -> int:
    counts = [1]
    for out in outs:
        if out is not None:
            count = 1
            for size in out["shape"]:
                count *= size
            counts.append(count)
    return max(counts)


def _size(groups: Sequence[Sequence[dict[str, Any] | None]]) -> float:
    return float(sum(out["s"] for outs in groups for out in outs if out is not None) ** 0.5)


def _apart(ours: Sequence[Sequence[Any]], alone: Sequence[Any]) -> float | None:
    """Returns the largest relative difference of the tensors of one call; ``None`` where none can be compared."""
    found = None
    for i, other in enumerate(alone):
        own = [group[i] if i < len(group) else None for group in ours]
        known = [one for one in own if one is not None]
        if other is None or len(known) < len(own):
            continue
        apart = _tensor_apart(known, other)
        if apart is not None:
            found = max(found or 0.0, apart)
    return found


def _are_others(ours: Sequence[Sequence[Any]], alone: Sequence[Any]) -> bool:
    """Returns whether one process got tensors that are neither the workers' joined nor the same as theirs.

    That is so where a script draws or reads its batches itself: each process then has a batch of the same size.
    """
    given = [(i, other) for i, other in enumerate(alone) if other is not None and other["shape"]]
    owns = [[group[i] for group in ours if i < len(group) and group[i] is not None] for i, _ in given]
    return bool(given) and all(
        any(one["shape"] == other["shape"] and one["total0"] != other["total0"] for one in own)
        for (_, other), own in zip(given, owns, strict=True)
    )


def _tensor_apart(own: Sequence[dict[str, Any]], other: dict[str, Any]) -> float | None:
    shape = other["shape"]
    if any(len(one["shape"]) != len(shape) for one in own) or not shape:
        return None
    for axis in range(min(len(shape), 2)):
        rest = [one["shape"][:axis] + one["shape"][axis + 1 :] for one in own]
        if any(one != shape[:axis] + shape[axis + 1 :] for one in rest):
            continue
        if sum(one["shape"][axis] for one in own) != shape[axis]:
            continue
        norm = max(other["s"], 1e-30) ** 0.5
        rows = [one.get(f"rows{axis}") for one in own]
        mine = other.get(f"rows{axis}")
        if mine is None or any(one is None for one in rows):
            return float(abs(sum(one[f"total{axis}"] for one in own) - other[f"total{axis}"]) / norm)
        together = sorted(value for one in rows if one is not None for value in one)
        off = sum((a - b) ** 2 for a, b in zip(together, sorted(mine), strict=True))
        return float(off**0.5 / norm)
    return None
