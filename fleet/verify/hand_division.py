"""Models that a script divides by hand: each worker makes its part of a tensor, or some of the modules, by itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.verify.data_findings import have_same_inputs
from fleet.verify.incomparable_runs import NotComparable
from fleet.verify.paired_runs import Run

_BY_NAME = ("gradients", "back", "parameters", "buffers", "entry", "states")
_CLOSE = 1e-4


@dataclass(frozen=True)
class HandDivision:
    """How a script divides its model.

    ``parts`` are the tensors of which each worker holds a part: what they have in common with the whole one is the
    norm. ``elsewhere`` are those whose names say nothing about the other run, as the first expert of each worker.
    ``is_one_copy`` says that all workers take the same samples and make up one copy of the model.
    """

    parts: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    is_one_copy: bool = False


def hand_division(many: Run, one: Run, ranks: Sequence[int]) -> HandDivision | None:
    """Returns how the script divides the model that one process has whole; None where every worker has all of it.

    Raises NotComparable where the workers' parts do not begin with the values of the whole.
    """
    starts = [_starts(many, rank) for rank in ranks]
    alone = _starts(one, 0)
    if not alone or not all(starts):
        return None
    parts = {name for name, whole in alone.items() if _are_parts([own.get(name) for own in starts], whole)}
    missing = alone.keys() - {name for own in starts for name in own}
    elsewhere = set(missing)
    for name in alone if missing else ():
        values = [own[name]["p"] for own in starts if name in own]
        if name not in parts and any(abs(value - values[0]) > 1e-9 for value in values):
            elsewhere.add(name)
    if not parts and not missing and all(own.keys() == alone.keys() for own in starts):
        return None
    for names in ([name] for name in sorted(parts)) if not elsewhere else (sorted(parts), sorted(elsewhere)):
        _need_same_start(starts, alone, names)
    return HandDivision(frozenset(parts), frozenset(elsewhere), _have_same_samples(many, ranks))


def mark_parts(many: Run, one: Run, division: HandDivision) -> None:
    """Makes the records say which tensors are parts, so that none is taken for a copy of another worker's.

    Those that are ``elsewhere`` leave the records of both runs.
    """
    for run, rank in [*((many, rank) for rank in range(len(many.records))), (one, 0)]:
        for digests in _by_name(run, rank):
            for name in list(digests):
                parameter = name.partition(" ")[0]
                if parameter in division.elsewhere:
                    del digests[name]
                elif run is many and parameter in division.parts:
                    digests[name]["part"] = f"of worker {rank}"


def _by_name(run: Run, rank: int) -> Iterator[dict[str, dict[str, Any]]]:
    for document in run.records[rank]:
        if document["kind"] == "start":
            yield document["values"]
        if document["kind"] == "update":
            yield from (document[kind] for kind in _BY_NAME if kind in document)


def _starts(run: Run, rank: int) -> dict[str, dict[str, Any]]:
    """Returns what the models that are trained begin with, by name."""
    starts = [start for start in run.of_kind(rank, "start") if not start["model"].startswith("frozen ")]
    return {name: value for start in starts for name, value in start["values"].items()}


def _are_parts(own: Sequence[dict[str, Any] | None], whole: dict[str, Any]) -> bool:
    """Returns whether the workers' tensors of one name are smaller than the one of one process, and make it up.

    Those that torch divides say so themselves. Together they may be larger: some fill up what cannot be divided evenly.
    """
    known = [one for one in own if one is not None]
    if len(known) < len(own) or any(one["part"] for one in (*known, whole)):
        return False
    sizes = [one["n"] for one in known]
    return bool(max(sizes) < whole["n"] <= sum(sizes))


def _need_same_start(
    starts: Sequence[dict[str, dict[str, Any]]], alone: dict[str, dict[str, Any]], names: Sequence[str]
) -> None:
    together = sum(own[name]["s"] for own in starts for name in names if name in own)
    whole = sum(alone[name]["s"] for name in names)
    if math.isfinite(whole) and abs(together - whole) > _CLOSE * max(together, whole):
        raise NotComparable(
            f"The script divides the model among the workers by hand, and their parts of {names[0]} do not begin with "
            f"the values of one process: their norm is {together**0.5:.6g} and that of one process {whole**0.5:.6g}. "
            "Draw or load the whole on every worker and keep a part of it, to compare them."
        )


def _have_same_samples(many: Run, ranks: Sequence[int]) -> bool:
    given = [[batch["rows"] for batch in many.of_kind(rank, "batch")] for rank in ranks]
    return all(rows == given[0] for rows in given) if any(given) else have_same_inputs(many, ranks)
