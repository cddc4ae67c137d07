"""The bits of a reproducible job beside those of one process that hosts all of its logical workers; tolerance 0.

One process runs the same script with the same options. Nothing is replayed: batches and draws belong to logical
workers, and must come out the same by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fleet.verify.number_findings import Comparison, relative
from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding

CAUSE = "bits-depend-on-processes"
_MOST = 3  # tensors that are named, of those that differ first
_AFTER = {  # what an update leaves behind -> how a tensor of it is called
    "gradients": "The gradient of {}",
    "parameters": "{}",
    "buffers": "The buffer {}",
    "states": "The optimizer's state {}",
}


def compare_bits(many: Run, one: Run) -> Comparison:
    """Compares each update: the turns of all logical workers, and gradients, parameters, buffers, states after it."""
    made = Comparison()
    alone = {(update["optimizer"], update["n"]): update for update in one.updates(0)}
    for ours in zip(*(many.updates(rank) for rank in range(len(many.records))), strict=False):
        other = alone.get((ours[0]["optimizer"], ours[0]["n"]))
        if other is None:
            continue
        update = _Update(ours, other)
        made.rows.append(update.row())
        made.compared += 1
        made.matched += len(other["turns"]) and len(other["parameters"])
        if not made.findings:
            made.findings = update.findings()
    made.findings = made.findings or _uneven_runs(many, one)
    return made


def _uneven_runs(many: Run, one: Run) -> list[Finding]:
    """Returns a finding where the workers make another number of updates than one process."""
    ours = len(many.updates(0))
    alone = len(one.updates(0))
    if ours == alone:
        return []
    return [
        Finding(
            cause="ranks-take-different-numbers-of-steps",
            sentence=f"The workers make {ours} updates and one process makes {alone}: what ends the loop depends on "
            "the number of processes. Count updates, where fleet.update_loss(loss) returns a number, or epochs.",
            step=min(ours, alone) + 1,
            expected=alone,
            received=ours,
        )
    ]


@dataclass
class _Turn:
    """The computations of a logical worker in one turn, and their process."""

    rank: int
    host: int
    made: dict[str, Any]
    draws: Sequence[str]


class _Update:
    """One update of all processes, and the same one of one process.

    Args:
        ours: the documents of the processes.
        alone: that of one process.
    """

    def __init__(self, ours: Sequence[dict[str, Any]], alone: dict[str, Any]) -> None:
        self._ours = ours
        self._alone = alone
        self._n: int = alone["n"]
        self._turns = {key: turn for host, update in enumerate(ours) for key, turn in _turns(update, host).items()}
        self._turns_alone = _turns(alone, 0)

    def row(self) -> dict[str, Any]:
        """Returns the losses, means over the logical workers, and the largest relative differences."""
        outs = [
            _apart(a, b)
            for key in self._turns.keys() & self._turns_alone.keys()
            for ours, other in zip(*(turns[key].made["forward"] for turns in self._both), strict=False)
            for a, b in zip(ours["outs"], other["outs"], strict=False)
        ]
        row = {"step": self._n, "loss_one": _mean(self._turns_alone), "loss_many": _mean(self._turns)}
        row["outputs"] = max(outs, default=None)
        for kind in ("gradients", "parameters"):
            row[kind] = max((_apart(got, expected) for _, _, got, expected in self._pairs(kind)), default=None)
        return row

    @property
    def _both(self) -> tuple[dict[tuple[int, int], _Turn], dict[tuple[int, int], _Turn]]:
        return self._turns, self._turns_alone

    def findings(self) -> list[Finding]:
        """Returns what differs first; what differs later in the update follows from it."""
        for stage in (self._rates(), self._between_processes(), self._in_turns(), self._after()):
            if found := list(islice(stage, _MOST)):
                return found
        return []

    def _rates(self) -> Iterator[Finding]:
        rates = self._ours[0]["rates"]
        if rates != self._alone["rates"]:
            yield Finding(
                cause=CAUSE,
                sentence=f"The learning rates of update {self._n} are others than in one process: they depend on the "
                "number of processes, or a schedule counts batches. With 'reproducible' an update has the batches of "
                "all logical workers on any number of processes, so the rates stay as they are.",
                step=self._n,
                tensor="learning rate",
                expected=self._alone["rates"],
                received=rates,
            )

    # ---- after the update ----------------------------------------------------------------------------------------

    def _pairs(self, kind: str) -> Iterator[tuple[int, str, dict[str, Any], dict[str, Any]]]:
        """Yields process, name, digest on it and in one process of each tensor of ``kind`` that both have."""
        for name, expected in self._alone[kind].items():
            for host, update in enumerate(self._ours):
                if (got := update[kind].get(name)) is not None and got["n"] == expected["n"]:
                    yield host, name, got, expected

    def _between_processes(self) -> Iterator[Finding]:
        """Yields a finding where processes hold different values after one update with the same gradients."""
        for kind in ("parameters", "buffers"):
            for name, expected in self._alone[kind].items():
                held = {host: update[kind][name] for host, update in enumerate(self._ours) if name in update[kind]}
                known = {one["bits"] for one in held.values()}
                if len(known) < 2:
                    continue
                # The value of one process is right; where no worker has it, worker 0 is believed.
                right = expected["bits"] if expected["bits"] in known else held[min(held)]["bits"]
                host = next(host for host, one in held.items() if one["bits"] != right)
                sentence = (
                    f"{_AFTER[kind].format(name)} is another one on worker {host} than on the others "
                    f"{self._when(kind)}: something changes it on this process alone."
                )
                yield self._finding(sentence, name, expected, held[host], host)
                return

    def _after(self) -> Iterator[Finding]:
        """Yields the tensors that differ after an update of equal turns."""
        for kind, words in _AFTER.items():
            named: set[str] = set()
            for host, name, got, expected in self._pairs(kind):
                if got["bits"] != expected["bits"] and name not in named:
                    named.add(name)
                    sentence = f"{words.format(name)} is not that of one process {self._when(kind)}."
                    yield self._finding(sentence, self._tensor(kind, name), expected, got, host)

    # ---- turns ---------------------------------------------------------------------------------------------------

    def _in_turns(self) -> Iterator[Finding]:
        """Yields the first difference of the first turn that differs."""
        if self._turns.keys() != self._turns_alone.keys():
            said = [sorted({turn.rank for turn in turns.values()}) for turns in self._both]
            yield Finding(
                cause=CAUSE,
                sentence=f"Update {self._n} has batches of the logical workers {said[0]} on the workers and of "
                f"{said[1]} in one process, or in other rounds: a loop over them depends on the process.",
                step=self._n,
                expected=said[1],
                received=said[0],
            )
            return
        for key in sorted(self._turns):
            found = list(islice(self._in_turn(self._turns[key], self._turns_alone[key]), 1))
            yield from found
            if found:
                return

    def _in_turn(self, ours: _Turn, alone: _Turn) -> Iterator[Finding]:
        who = f"logical worker {ours.rank}, hosted by worker {ours.host}"
        for call, other in zip(ours.made["forward"], alone.made["forward"], strict=False):
            name = call["module"] or call["type"]
            if call["module"] != other["module"]:
                yield self._other_calls(ours, name, other["module"] or other["type"])
            for got, expected in _different(call["ins"], other["ins"]):
                sentence = (
                    f"At update {self._n} {name} ({call['type']}) of {who}, has other inputs than in one process: its "
                    "batch, or a draw before it, depends on the process (a generator seeded with fleet.worker_index(), "
                    "a sampler by rank, data drawn without a seed that all share). Take rows from ElasticSampler or by "
                    "fleet.elastic.logical_ranks(), and draw from torch's own generator."
                )
                yield self._finding(sentence, "input", expected, got, ours.host, call["module"])
            for got, expected in _different(call["outs"], other["outs"]):
                drew = "its random draws" if ours.draws != alone.draws else "its weights, kernels or unseen draws"
                sentence = (
                    f"At update {self._n} {name} ({call['type']}) of {who}, gives other outputs than in one process "
                    f"for the same inputs: {drew} are others."
                )
                yield self._finding(sentence, "output", expected, got, ours.host, call["module"])
        if len(ours.made["forward"]) != len(alone.made["forward"]):
            counts = [f"{len(turn.made['forward'])} calls" for turn in (ours, alone)]
            yield self._other_calls(ours, *counts)
        for got, expected in zip(ours.made["losses"], alone.made["losses"], strict=False):
            if got != expected and (got == got or expected == expected):  # NaN on both sides is equal
                sentence = f"At update {self._n} the loss of {who}, is {got!r}, and {expected!r} in one process."
                yield Finding(
                    cause=CAUSE, sentence=sentence, step=self._n, rank=ours.host, tensor="loss", expected=expected,
                    received=got, difference=abs(got - expected) / max(abs(expected), 1e-30),
                )  # fmt: skip

    def _other_calls(self, turn: _Turn, here: str, alone: str) -> Finding:
        return Finding(
            cause=CAUSE,
            sentence=f"At update {self._n} logical worker {turn.rank}, hosted by worker {turn.host}, calls other "
            "modules than in one process: the loop depends on the process.",
            step=self._n,
            rank=turn.host,
            expected=alone,
            received=here,
        )

    # ---- findings ------------------------------------------------------------------------------------------------

    def _when(self, kind: str) -> str:
        return f"at update {self._n}" if kind == "gradients" else f"after update {self._n}"

    def _tensor(self, kind: str, name: str) -> str:
        return f"gradient of {name}" if kind == "gradients" else name

    def _finding(
        self, sentence: str, tensor: str, expected: Mapping[str, Any], got: Mapping[str, Any], host: int,
        module: str | None = None,
    ) -> Finding:  # fmt: skip
        return Finding(
            cause=CAUSE,
            sentence=sentence,
            step=self._n,
            rank=host,
            module=tensor.removeprefix("gradient of ").rpartition(".")[0] if module is None else module,
            tensor=tensor,
            expected=expected["s"] ** 0.5,
            received=got["s"] ** 0.5,
            difference=_apart(got, expected),
        )


def _turns(update: Mapping[str, Any], host: int) -> dict[tuple[int, int], _Turn]:
    """Returns the turns of ``update`` by round and logical rank, each with its draws."""
    found: dict[tuple[int, int], _Turn] = {}
    begins = [turn["drawn"] for turn in update["turns"].values()]
    for (key, made), end in zip(update["turns"].items(), [*begins[1:], len(update["draws"])], strict=False):
        number, rank = map(int, key.split())
        found[number, rank] = _Turn(rank, host, made, update["draws"][made["drawn"] : end])
    return found


def _different(
    ours: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    for got, expected in zip(ours, alone, strict=False):
        if got["bits"] != expected["bits"] or got["n"] != expected["n"]:
            yield got, expected


def _apart(got: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Returns the relative difference of two tensors; 0.0 where they have the same bits."""
    return 0.0 if got["bits"] == expected["bits"] else relative(got, expected)


def _mean(turns: Mapping[Any, _Turn]) -> float | None:
    losses = [turn.made["losses"][-1] for _, turn in sorted(turns.items()) if turn.made["losses"]]
    return sum(losses) / len(losses) if losses else None
