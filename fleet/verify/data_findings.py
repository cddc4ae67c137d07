"""What the DataLoaders of the workers gave: samples twice, left out, and the same order in every epoch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any, TypeVar

from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding
from fleet.verify.user_lines import place_of

_Row = TypeVar("_Row", bound=Hashable)
_LEAST_SHARED = 4  # rows in two workers, where their permutations are known to differ


def data_findings(many: Run, one: Run, ranks: Sequence[int]) -> list[Finding]:
    """Returns what is wrong with the samples of ``ranks``, one worker of each copy of the model."""
    found: list[Finding] = []
    trained = {batch["key"] for rank in ranks for batch in many.of_kind(rank, "batch")}
    for key in sorted(trained):
        facts = [_facts(many, rank, key) for rank in ranks]
        alone = _facts(one, 0, key)
        found += _repeated(many, ranks, key, facts) or _overlapping(many, ranks, key, facts)
        found += _left_out(key, facts, alone) if not found else []
        found += _same_order(many, ranks[0], key, facts[0])
        found = found or _uneven_epochs(many, ranks, key)
    return found if trained or len(ranks) < 2 else _same_inputs(many, ranks)


def have_same_inputs(many: Run, ranks: Sequence[int]) -> bool:
    """Returns whether the models of ``ranks`` were called with the same tensors in every update that tells."""
    seen = [
        [[call["ins"] for call in update["forward"][-1:]] for update in many.updates(rank)[:2]] for rank in ranks
    ]  # fmt: skip
    return any(ins for update in seen[0] for ins in update) and all(other == seen[0] for other in seen[1:])


def _same_inputs(many: Run, ranks: Sequence[int]) -> list[Finding]:
    """Returns a finding where a script without a DataLoader gives all workers the same batches."""
    if not have_same_inputs(many, ranks):
        return []
    return [
        Finding(
            cause="no-distributed-sampler",
            sentence="Every worker trains on the same inputs, which the script draws or reads without a DataLoader: "
            "seed each worker differently after the model is made, such as torch.manual_seed(seed + rank), or give "
            "each worker rows of its own.",
            step=1,
            rank=ranks[1],
        )
    ]


def data_notes(many: Run, ranks: Sequence[int]) -> list[str]:
    """Returns what could not be looked at."""
    notes = []
    for key in sorted({batch["key"] for batch in many.of_kind(ranks[0], "batch")}):
        facts = _facts(many, ranks[0], key)
        if facts.get("shuffles") and {batch["round"] for batch in _batches(many, ranks[0], key)} == {1}:
            notes.append(
                f"The loader at {_place(key)} was not begun a second time within these steps, so the order of its "
                "second epoch was not looked at; more --steps do."
            )
    return notes


def _facts(run: Run, rank: int, key: str) -> dict[str, Any]:
    return next((one for one in run.of_kind(rank, "loader") if one["key"] == key), {})


def _batches(run: Run, rank: int, key: str) -> list[dict[str, Any]]:
    """Returns the batches of one loader that ``rank`` trained with."""
    return [batch for batch in run.of_kind(rank, "batch") if batch["key"] == key]


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
        for batch in _batches(many, rank, key):
            indices = batch["samples"] or [None] * len(batch["rows"])
            for index, row in zip(indices, batch["rows"], strict=False):
                holders[batch["round"], index, row].setdefault(rank, batch)
    twice = [sample for sample, held in holders.items() if len(held) > 1]
    filled = facts[0].get("fill", 0) * len({sample[0] for sample in twice})  # at the end of each epoch, by its start
    known = all(sample[1] is not None for sample in holders)
    share = len(twice) / max(1, len(holders))
    if len(twice) - filled < max(len(ranks), 2) or (
        not known and (share < 0.9 or _have_rows_by_chance(many, ranks, key))
    ):
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


def _have_rows_by_chance(many: Run, ranks: Sequence[int], key: str) -> bool:
    """Returns whether the data repeats rows, such as small numbers, and the workers had them in other numbers."""
    counts = [
        Counter((batch["round"], row) for batch in _batches(many, rank, key) for row in batch["rows"]) for rank in ranks
    ]
    return any(max(own.values(), default=0) > 1 for own in counts) and any(own != counts[0] for own in counts)


def _why_repeated(
    number: int, share: float, facts: Sequence[dict[str, Any]], holders: str, sample: int | None
) -> tuple[str, str]:
    """Returns the cause and the sentence for ``number`` samples that several workers had."""
    sampler = facts[0].get("sampler", "")
    divided = any((one.get("replicas") or 1) > 1 for one in facts)
    if share >= 0.9 and not divided:
        why = f"the DataLoader has no DistributedSampler; its sampler is a {sampler}"
        if facts[0].get("replicas"):
            why = f"its {sampler} has num_replicas=1, and there are {len(facts)} workers"
        elif sample is None:
            why = "the DataLoader has no DistributedSampler; its data set gives every worker all samples"
        return (
            "no-distributed-sampler",
            f"Every worker trains on the same samples ({number} in these steps): {why}.",
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


def shared_rows(of_each: Sequence[Sequence[_Row]]) -> list[_Row]:
    """Returns the rows that several workers had in one pass; none where a worker had a row twice itself.

    Draws with replacement and data with equal rows give a row to one worker twice as often as to two of them.
    """
    if any(len(set(rows)) < len(rows) for rows in of_each):
        return []
    return [row for row, holders in Counter(chain.from_iterable(of_each)).items() if holders > 1]


def permutation_reason(many: Run, ranks: Sequence[int], rows: int) -> str:
    """Returns which permutation of more than ``rows`` rows differs between the workers; "" where none does."""
    noted: list[dict[tuple[str, str, int], list[str]]] = []
    for rank in ranks:
        noted.append(defaultdict(list))
        for one in many.of_kind(rank, "permutation"):
            noted[-1][one["name"], one["where"], one["n"]].append(one["content"])
    for name, where, n in noted[0]:
        drawn = [own.get((name, where, n), [])[:1] for own in noted]
        if n > rows and all(drawn) and any(one != drawn[0] for one in drawn):
            return (
                f"{name} at {place_of(where)} differs between the workers: workers that permute the same data with "
                "other seeds and then take [rank::world] share rows. Seed it alike on all, unless each permutes rows "
                "of its own."
            )
    return ""


def _overlapping(many: Run, ranks: Sequence[int], key: str, facts: Sequence[dict[str, Any]]) -> list[Finding]:
    """Returns a finding where workers got some of the same rows of iterable data, which has no indices."""
    if not facts[0].get("iterable"):
        return []
    batches = [_batches(many, rank, key) for rank in ranks]
    twice: list[str] = []
    for number in sorted({batch["round"] for batch in batches[0]}):
        passes = [[batch["rows"] for batch in own if batch["round"] == number] for own in batches]
        # The last batch of a pass may be filled up with rows of the first.
        start, end = ({row for own in passes if own for row in own[i]} for i in (0, -1))
        twice += [row for row in shared_rows([[*chain(*own)] for own in passes]) if not (row in start and row in end)]
    rows = [row for own in batches for batch in own for row in batch["rows"]]
    permuted = permutation_reason(many, ranks, len(rows) // len(ranks))
    # Of equal rows by chance, 1/N are in one worker: none of 4N - 2 is less than once in 60 times.
    if len(twice) < (_LEAST_SHARED if permuted else 4 * len(ranks) - 2):
        return []
    first = [next((batch for batch in own if twice[0] in batch["rows"]), None) for own in batches]
    holders = [(rank, batch) for rank, batch in zip(ranks, first, strict=True) if batch is not None]
    return [
        Finding(
            cause="samples-seen-twice",
            sentence=f"{len(twice)} of {len(set(rows))} rows were given to more than one worker in one pass over the "
            "data, and no worker had a row twice itself: the workers' parts of the data overlap, and other rows are "
            f"left out. {permuted}".rstrip(),
            step=update_after(many, *holders[-1]),
            rank=holders[-1][0],
            where=_place(key),
            expected=0,
            received=len(twice),
        )
    ]


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


def _uneven_epochs(many: Run, ranks: Sequence[int], key: str) -> list[Finding]:
    """Returns a finding where a worker began another epoch after fewer batches than another one had in this."""
    counts = [Counter(batch["round"] for batch in _batches(many, rank, key)) for rank in ranks]
    for number in sorted(counts[0]):
        ended = [own[number] for own in counts if max(own, default=0) > number]
        most = max(own[number] for own in counts)
        if not ended or min(ended) == most:
            continue
        few = next(i for i, own in enumerate(counts) if own[number] == min(ended))
        batch = next(batch for batch in _batches(many, ranks[few], key) if batch["round"] > number)
        return [
            Finding(
                cause="ranks-take-different-numbers-of-steps",
                sentence=f"Worker {ranks[few]} begins epoch {number + 1} after {min(ended)} batches, and another "
                f"worker has {most} in epoch {number}: what they exchange from then on is of different "
                "steps. Give every worker the same number of batches.",
                step=update_after(many, ranks[few], batch),
                rank=ranks[few],
                expected=most,
                received=min(ended),
                where=_place(key),
            )
        ]
    return []


def _same_order(many: Run, rank: int, key: str, facts: dict[str, Any]) -> list[Finding]:
    """Returns a finding where a sampler that shuffles gave two epochs in the same order."""
    if not facts.get("shuffles"):
        return []
    epochs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for batch in _batches(many, rank, key):
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
