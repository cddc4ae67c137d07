"""What the DataLoaders of the workers gave: samples twice, left out, and the same order in every epoch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding


def data_findings(many: Run, one: Run, ranks: Sequence[int]) -> list[Finding]:
    """Returns what is wrong with the samples of ``ranks``, one worker of each copy of the model."""
    found: list[Finding] = []
    trained = {batch["key"] for rank in ranks for batch in many.of_kind(rank, "batch")}
    for key in sorted(trained):
        facts = [_facts(many, rank, key) for rank in ranks]
        alone = _facts(one, 0, key)
        found += _repeated(many, ranks, key, facts)
        found += _left_out(key, facts, alone) if not found else []
        found += _same_order(many, ranks[0], key, facts[0])
    return found


def data_notes(many: Run, ranks: Sequence[int]) -> list[str]:
    """Returns what could not be looked at."""
    notes = []
    batches = many.of_kind(ranks[0], "batch")
    for key in sorted({batch["key"] for batch in batches}):
        facts = _facts(many, ranks[0], key)
        if facts.get("shuffles") and {b["round"] for b in batches if b["key"] == key} == {1}:
            notes.append(
                f"The loader at {_place(key)} was not begun a second time within these steps, so the order of its "
                "second epoch was not looked at; more --steps do."
            )
    return notes


def _facts(run: Run, rank: int, key: str) -> dict[str, Any]:
    return next((one for one in run.of_kind(rank, "loader") if one["key"] == key), {})


def _place(key: str) -> str:
    return key.rpartition("#")[0]


def update_after(run: Run, rank: int, wanted: dict[str, Any]) -> int:
    """Returns the number of the update that follows a document of ``rank``."""
    made = 0
    for one in run.records[rank]:
        if one is wanted:
            return made + 1
        made = one["n"] if one["kind"] == "update" else made
    return made


def _repeated(many: Run, ranks: Sequence[int], key: str, facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """Returns a finding where workers got the same samples in one epoch."""
    holders: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = defaultdict(dict)
    for rank in ranks:
        for batch in (b for b in many.of_kind(rank, "batch") if b["key"] == key):
            indices = batch["samples"] or [None] * len(batch["rows"])
            for index, row in zip(indices, batch["rows"], strict=False):
                holders[batch["round"], index, row].setdefault(rank, batch)
    twice = [sample for sample, held in holders.items() if len(held) > 1]
    known = all(sample[1] is not None for sample in holders)
    share = len(twice) / max(1, len(holders))
    if len(twice) < max(len(ranks), 2) or (not known and share < 0.9):
        return []
    held = holders[twice[0]]
    rank, batch = next(iter(held.items()))
    cause, sentence = _why_repeated(len(twice), share, facts, f"{sorted(held)}", twice[0][1])
    return [
        Finding(
            cause=cause,
            sentence=sentence,
            step=update_after(many, rank, batch),
            rank=max(held),
            where=_place(key),
            expected=0,
            received=len(twice),
        )
    ]


def _why_repeated(
    number: int, share: float, facts: Sequence[dict[str, Any]], holders: str, sample: int | None
) -> tuple[str, str]:
    """Returns the cause and the sentence for ``number`` samples that several workers had."""
    sampler = facts[0].get("sampler", "")
    divided = any((one.get("replicas") or 1) > 1 for one in facts)
    if share >= 0.9 and not divided:
        kind = "its data set gives every worker all samples" if sample is None else f"its sampler is a {sampler}"
        return (
            "no-distributed-sampler",
            f"Every worker trains on the same samples ({number} in these steps): the DataLoader has no "
            f"DistributedSampler; {kind}.",
        )
    if not divided and all(one.get("planned") == one.get("samples") for one in facts) and sampler == "RandomSampler":
        return (
            "no-distributed-sampler",
            "Every worker draws from all samples, so some are trained on by several workers in one epoch: the "
            "DataLoader has no DistributedSampler.",
        )
    return (
        "samples-seen-twice",
        f"{number} samples were given to more than one worker in the same epoch (workers {holders} all had sample "
        f"{sample}): the workers' parts of the data overlap.",
    )


def _left_out(key: str, facts: Sequence[dict[str, Any]], alone: dict[str, Any]) -> list[Finding]:
    """Returns a finding where all workers together plan fewer samples for an epoch than one process does."""
    planned = [one.get("planned") for one in facts]
    wanted = alone.get("planned")
    if wanted is None or any(number is None for number in planned):
        return []
    together = sum(number for number in planned if number is not None)
    batch = (facts[0].get("batch_size") or 1) * len(facts)
    if together + max(batch, len(facts)) > wanted:
        return []
    return [
        Finding(
            cause="samples-left-out",
            sentence=f"The workers train on {together} of {wanted} samples in each epoch: the data is divided among "
            "the workers more than once, or part of it is given to none.",
            step=1,
            expected=wanted,
            received=together,
            difference=(wanted - together) / wanted,
            where=_place(key),
        )
    ]


def _same_order(many: Run, rank: int, key: str, facts: dict[str, Any]) -> list[Finding]:
    """Returns a finding where a sampler that shuffles gave two epochs in the same order."""
    if not facts.get("shuffles"):
        return []
    epochs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for batch in (b for b in many.of_kind(rank, "batch") if b["key"] == key):
        epochs[batch["round"]].append(batch)
    rounds = sorted(epochs)
    for before, after in zip(rounds, rounds[1:], strict=False):
        left, right = epochs[before], epochs[after]
        length = min(len(left), len(right))
        if length and all(a["indices"] and a["indices"] == b["indices"] for a, b in zip(left, right, strict=False)):
            if len(set(left[0]["indices"])) < 2:
                continue
            return [
                Finding(
                    cause="sampler-without-set-epoch",
                    sentence=f"Epoch {after} has its samples in the order of epoch {before}: call "
                    "sampler.set_epoch(epoch) before each epoch.",
                    step=update_after(many, rank, right[0]),
                    rank=rank,
                    received=right[0]["indices"][:8],
                    where=_place(key),
                )
            ]
    return []
