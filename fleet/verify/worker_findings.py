"""What the records of the workers say by themselves: where they differ from each other, and what nobody updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding

_CLOSE = 1e-6


def worker_findings(
    many: Run, one: Run, ranks: Sequence[int], *, parts: bool, local: bool, readers: int | None = None
) -> list[Finding]:
    """Returns what ``ranks`` have differently that should be equal.

    ``parts`` says that workers hold parts of the model, ``local`` that a strategy trains each worker apart for a while.
    The first ``readers`` take samples of their own (None: all of them).
    """
    found: list[Finding] = []
    if not parts:
        found += _unfilled(many, one, ranks[0]) or _initial(many, ranks)
        found += _ties(many, one, ranks[0])
    found += _rates(many, one, ranks)
    if not parts:
        found += _modes(many, ranks, local=local)
        found += [] if local else _buffers(many, one, ranks) + _gradients(many, ranks)
    found += _draws(many, ranks[:readers])
    found += _evaluating(many, ranks) + _reseeded(many, ranks[0])
    return found + _uncovered(one)


def _pairs(many: Run, ranks: Sequence[int]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yields the number of each update with the documents of all ranks."""
    for updates in zip(*(many.updates(rank) for rank in ranks), strict=False):
        yield updates[0]["n"], list(updates)


def differing(digests: Sequence[dict[str, Any]], tolerance: float = _CLOSE) -> float | None:
    """Returns the relative difference of the copies of one tensor, or of one shard; ``None`` where they are equal.

    Copies that hold NaN or infinities on all workers count as equal.
    """
    for part in {digest["part"] for digest in digests}:
        copies = [digest for digest in digests if digest["part"] == part]
        if not any(math.isfinite(d["s"]) for d in copies):
            continue
        size = max(d["s"] for d in copies) ** 0.5
        apart = max(d["p"] for d in copies) - min(d["p"] for d in copies)
        if size and not apart <= tolerance * size:
            return float(apart / size)
    return None


def _initial(many: Run, ranks: Sequence[int]) -> list[Finding]:
    starts = [{start["model"]: start["values"] for start in many.of_kind(rank, "start")} for rank in ranks]
    for model in starts[0]:
        for name in starts[0][model]:
            digests = [values.get(model, {}).get(name) for values in starts]
            apart = differing([d for d in digests if d is not None])
            if apart is not None:
                sentence = (
                    f"The workers begin with different values of {name}: seed them alike before the model is made, or "
                    "wrap the model, which sends worker 0's values."
                )
                return _tensor_apart("initial-weights-differ", sentence, 0, ranks, name, digests, apart)
    return []


def _unfilled(many: Run, one: Run, rank: int) -> list[Finding]:
    """Returns a finding where the workers begin with NaN or infinities, and one process by itself with numbers."""
    for ours, alone in zip(many.of_kind(rank, "start"), one.of_kind(0, "start"), strict=False):
        for name in set(ours.get("unfilled", ())) - set(alone.get("unfilled", ())):
            return [
                Finding(
                    cause="initial-weights-differ",
                    sentence=f"The workers begin with values of {name} that are no numbers, and one process with "
                    "numbers: what was loaded or drawn is replaced by new memory, as by to_empty(), or never arrives. "
                    "Give a module memory before its weights are loaded.",
                    step=0,
                    rank=rank,
                    module=name.rpartition(".")[0],
                    tensor=name,
                    expected="numbers",
                    received="NaN or infinite",
                )
            ]
    return []


def _tensor_apart(
    cause: str,
    sentence: str,
    step: int,
    ranks: Sequence[int],
    name: str,
    digests: Sequence[dict[str, Any] | None],
    apart: float | None,
    of: str = "",
) -> list[Finding]:
    """Returns the finding that a tensor, or the gradient ``of`` it, is not the same on the second worker."""
    expected, received = (None if digest is None else float(digest["s"] ** 0.5) for digest in digests[:2])
    return [
        Finding(
            cause=cause,
            sentence=sentence,
            step=step,
            rank=ranks[1],
            module=name.rpartition(".")[0],
            tensor=f"{of}{name}",
            expected=expected,
            received=received,
            difference=apart,
        )
    ]


def _ties(many: Run, one: Run, rank: int) -> list[Finding]:
    for ours, alone in zip(many.of_kind(rank, "start"), one.of_kind(0, "start"), strict=False):
        known = [set(group) for group in ours["ties"]]
        for group in alone["ties"]:
            if not any(set(group) <= other for other in known):
                return [
                    Finding(
                        cause="tied-weights-apart",
                        sentence=f"{' and '.join(group)} are one parameter in one process and come apart on the "
                        "workers: something made new parameters of them after they were tied.",
                        step=0,
                        module=group[-1].rpartition(".")[0],
                        tensor=group[-1],
                        expected=f"shares its memory with {group[0]}",
                        received="a parameter of its own",
                    )
                ]
    return []


def _rates(many: Run, one: Run, ranks: Sequence[int]) -> list[Finding]:
    for n, updates in _pairs(many, ranks):
        rates = [update["rates"] for update in updates]
        for rank, values in zip(ranks[1:], rates[1:], strict=True):
            if values != rates[0]:
                return [
                    Finding(
                        cause="scheduler-stepped-unevenly",
                        sentence=f"At update {n} worker {rank} has the learning rate {values[0]:g} and worker "
                        f"{ranks[0]} has {rates[0][0]:g}: the scheduler is not stepped by every worker alike.",
                        step=n,
                        rank=rank,
                        tensor="learning rate",
                        expected=rates[0][0],
                        received=values[0],
                    )
                ]
    return _scaled_rates(many, one, ranks)


def _scaled_rates(many: Run, one: Run, ranks: Sequence[int]) -> list[Finding]:
    """A rate whose highest value is more than N times that of one process.

    The highest: a schedule that is made for N workers (fewer steps of warm-up, a slower decay) has other rates at each
    update without being wrong.
    """
    workers = len(many.records)
    if _steps_for_each_worker(many, one, ranks):
        return []
    highest: dict[tuple[Any, int], tuple[float, float]] = {}  # of each optimizer and group
    for ours, alone in zip(many.updates(ranks[0]), one.updates(0), strict=False):
        for i, (mine, other) in enumerate(zip(ours["rates"], alone["rates"], strict=False)):
            before = highest.get((ours.get("optimizer"), i), (0.0, 0.0))
            highest[ours.get("optimizer"), i] = (max(before[0], mine), max(before[1], other))
            top, base = highest[ours.get("optimizer"), i]
            if base and top / base > 1.05 * workers:
                return [
                    Finding(
                        cause="learning-rate-scaled-twice",
                        sentence=f"Up to update {ours['n']} the learning rate is {top / base:.3g} times that of one "
                        f"process, and there are {workers} workers: it is multiplied by their number more than once.",
                        step=ours["n"],
                        tensor="learning rate",
                        expected=f"at most {base * workers:g}, the number of workers times {base:g}",
                        received=top,
                        difference=top / (base * workers) - 1,
                    )
                ]
    return []


def _steps_for_each_worker(many: Run, one: Run, ranks: Sequence[int]) -> bool:
    """Returns whether the workers' schedule moves N steps at each update, as Accelerate's does, and otherwise agrees.

    A curve that rises faster than a line, such as OneCycleLR's, is more than N times as high there.
    """
    alone = list(one.updates(0))[:: len(many.records)]
    pairs = list(zip(many.updates(ranks[0]), alone, strict=False))
    rates = [zip(mine["rates"], other["rates"], strict=False) for mine, other in pairs]
    return len(pairs) > 1 and all(math.isclose(a, b, rel_tol=_CLOSE) for both in rates for a, b in both)


def _modes(many: Run, ranks: Sequence[int], *, local: bool) -> list[Finding]:
    """Batch norm that trains on one worker and not on another, or starts a step with statistics of its own."""
    for n, updates in _pairs(many, ranks):
        for name, training in updates[0]["modes"].items():
            for rank, update in zip(ranks[1:], updates[1:], strict=True):
                if update["modes"].get(name, training) != training:
                    off = ranks[0] if not training else rank
                    return [
                        Finding(
                            cause="batchnorm-statistics",
                            sentence=f"At update {n} the batch norm {name} of worker {off} is in evaluation mode and "
                            "that of the others in training mode: call model.train() after an evaluation on every "
                            "worker.",
                            step=n,
                            rank=off,
                            module=name,
                            expected="training mode",
                            received="evaluation mode",
                        )
                    ]
        found = [] if local else _entry(n, updates, ranks)
        if found:
            return found
    return []


def _entry(n: int, updates: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[Finding]:
    names = [name for name in updates[0]["entry"] if name.rpartition(".")[0] in updates[0]["modes"]]
    for name in names:
        digests = [update["entry"][name] for update in updates if name in update["entry"]]
        apart = differing(digests) if len(digests) == len(updates) else None
        if apart is not None:
            sentence = (
                f"The workers begin update {n} with different running statistics in {name}: nobody sends worker 0's to "
                "the others, so what is saved depends on who saves."
            )
            return _tensor_apart("batchnorm-statistics", sentence, n, ranks, name, digests, apart)
    return []


def _buffers(many: Run, one: Run, ranks: Sequence[int]) -> list[Finding]:
    """Buffers, other than those of batch norm, that differ between the workers and from one process after an update."""
    alone = {update["n"]: update for update in one.updates(0)}
    for n, updates in _pairs(many, ranks):
        for name, first in updates[0]["buffers"].items():
            digests = [update["buffers"].get(name, first) for update in updates]
            apart = differing(digests)
            norm = name.rpartition(".")[0] in updates[0]["modes"]
            other = alone.get(n, {}).get("buffers", {}).get(name)
            if apart is None or norm or (other is not None and differing([first, other], 1e-4) is None):
                continue
            sentence = (
                f"The buffer {name} follows each worker's own samples and is not averaged: after update {n} it differs "
                "between the workers."
            )
            return _tensor_apart("buffer-not-synchronised", sentence, n, ranks, name, [other, digests[1]], apart)
    return []


def _gradients(many: Run, ranks: Sequence[int]) -> list[Finding]:
    for n, updates in _pairs(many, ranks):
        for name in updates[0]["gradients"]:
            digests = [update["gradients"][name] for update in updates if name in update["gradients"]]
            if len(digests) < len(updates) or differing(digests, 1e-5) is None or not _comes_apart(name, updates):
                continue
            cause, sentence = _why_apart(name, updates)
            apart = differing(digests, 0.0)
            made = _tensor_apart(cause, sentence, n, ranks, name, digests, apart, of="gradient of ")
            around = _line_around(updates) if cause == "gradients-not-averaged" else ""
            return [dataclasses.replace(one, where=around) for one in made]
        found = _lacking(n, updates, ranks)
        if found:
            return found
    return []


def _comes_apart(name: str, updates: Sequence[dict[str, Any]]) -> bool:
    """Returns whether the workers hold copies of a parameter that differ after an update."""
    moved = [update["parameters"][name] for update in updates if name in update["parameters"]]
    return len(moved) == len(updates) and differing(moved, 1e-9) is not None


def _lacking(n: int, updates: Sequence[dict[str, Any]], ranks: Sequence[int]) -> list[Finding]:
    """Returns a finding where some workers update a parameter that others hold in an optimizer without a gradient."""
    for name in sorted({name for update in updates for name in update["gradients"]}):
        digests = [update["gradients"].get(name) for update in updates]
        # A worker that another one updates this parameter for has it in no optimizer.
        is_held = all(name in update["held"] for update in updates)
        if None not in digests or not is_held or not _comes_apart(name, updates):
            continue
        without = ranks[digests.index(None)]
        sentence = (
            f"At update {n} worker {without} has no gradient of {name}, which the others update: the exchange leaves "
            "out parameters that a worker's own samples do not reach. Every worker takes part for every parameter, "
            "with zeros where it has no gradient."
        )
        found = _tensor_apart("gradients-not-averaged", sentence, n, ranks, name, digests, None, of="gradient of ")
        return [dataclasses.replace(found[0], rank=without)]
    return []


def _line_around(updates: Sequence[dict[str, Any]]) -> str:
    """Returns the line of a pass around the wrapped model in an update; "" where there is none."""
    return next((update["lines"]["around"] for update in updates if "around" in update.get("lines", {})), "")


def _why_apart(name: str, updates: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Returns the cause and the sentence of gradients with which the workers update, and that differ."""
    behind = [update.get("back", {}).get(name) for update in updates]
    if None not in behind and differing([digest for digest in behind if digest is not None], 1e-5) is None:
        return (
            "gradients-changed-by-worker",
            f"The workers have the same gradient of {name} after backward() and update it with different ones: before "
            "step() each of them changes it by something of its own, such as a limit, a factor or noise that depends "
            "on the worker. Change it alike on every worker.",
        )
    if _line_around(updates):
        return (
            "gradients-not-averaged",
            f"A pass went around the wrapped model: this line calls the model inside it, or a part of that, and no "
            f"exchange follows, so each worker updates {name} with the gradient of its own samples. Call the wrapped "
            "model, or average the gradients before step().",
        )
    return (
        "gradients-not-averaged",
        f"Each worker updates {name} with the gradient of its own samples: its model was not wrapped "
        "(distributed_model(), DistributedDataParallel, accelerator.prepare()) or over a mesh without all workers, a "
        "pass went around the wrapped model, or the update follows passes under no_sync() alone.",
    )


def _seed_call(many: Run) -> str:
    """Returns the call that gives each worker a seed of its own, as the script's framework has it."""
    in_accelerate = any(job["engine"] == "accelerate" for job in many.of_kind(0, "job"))
    return "set_seed(seed, device_specific=True)" if in_accelerate else "torch.manual_seed(seed + rank)"


def _draws(many: Run, ranks: Sequence[int]) -> list[Finding]:
    if len(ranks) < 2:
        return []
    seen = 0
    for n, updates in _pairs(many, ranks):
        draws = [update["draws"] for update in updates]
        seen += len(draws[0])
        if not draws[0]:
            continue
        if any(other != draws[0] for other in draws[1:]):
            return []
        return [
            Finding(
                cause="dropout-seeded-alike",
                sentence="All workers draw the same numbers (masks of dropout, noise) for their different samples at "
                f"update {n}: seed each worker differently after the model is made, such as {_seed_call(many)}.",
                step=n,
                rank=ranks[1],
                expected="draws that differ between the workers",
                received="the same draws on all workers",
            )
        ]
    return []


def _reseeded(many: Run, rank: int) -> list[Finding]:
    """Returns a finding where training draws from a generator whose seed the script replaces by one of the system's."""
    where = ""
    for document in many.records[rank]:
        where = document["where"] if document["kind"] == "reseeded" else where
        if document["kind"] == "update" and document["draws"] and where:
            return [
                Finding(
                    cause="unseeded-randomness",
                    sentence="The script gives torch a seed, and torch.seed() takes another one from the system before "
                    "it trains: no two runs draw the same numbers. Give the seed where training begins.",
                    step=document["n"],
                    rank=rank,
                    expected="the seed of the script",
                    received="one of the system's",
                    where=where,
                )
            ]
    return []


def _evaluating(many: Run, ranks: Sequence[int]) -> list[Finding]:
    """Returns a finding where a model is updated by passes that it made in evaluation mode, without its dropout."""
    for n, updates in _pairs(many, ranks):
        for rank, update in zip(ranks, updates, strict=True):
            for name in update.get("idle", ())[:1]:
                return [
                    Finding(
                        cause="model-in-evaluation-mode",
                        sentence=f"At update {n} the model is in evaluation mode in the passes whose gradients update "
                        f"it, so {name} and all other dropout in it does nothing: call model.train() before them.",
                        step=n,
                        rank=rank,
                        module=name,
                        expected="training mode",
                        received="evaluation mode",
                    )
                ]
    return []


def _moves(one: Run, name: str) -> bool:
    """Returns whether a parameter changes between updates: a script may update a copy and write it back."""
    values = [update["parameters"][name] for update in one.updates(0) if name in update["parameters"]]
    return any(value["p"] != values[0]["p"] for value in values)


def _uncovered(one: Run) -> list[Finding]:
    end = one.end(0)
    trained, held = set(end.get("with_gradient", ())), set(end.get("held", ()))
    missing = sorted(name for name in trained - held if not _moves(one, name))
    if not missing or not one.updates(0):
        return []
    if not trained & held:
        cause = "optimizer-of-other-parameters"
        sentence = (
            "No parameter of the model that is trained is in an optimizer: the optimizer was made for another model, "
            "or before the model was copied or converted."
        )
    else:
        cause = "parameter-in-no-optimizer"
        gets, are, them = ("gets", "is", "it") if len(missing) == 1 else ("get", "are", "them")
        sentence = f"{', '.join(missing[:4])} {gets} gradients and {are} in no optimizer, so nothing updates {them}."
    return [
        Finding(
            cause=cause,
            sentence=sentence,
            step=1,
            module=missing[0].rpartition(".")[0],
            tensor=missing[0],
            expected="in an optimizer",
            received="in none",
        )
    ]


def idle_options(job: dict[str, Any]) -> list[Finding]:
    """Returns a finding for each strategy that is on and, by its own account, changes nothing as it is set.

    Where the reason is this machine (no GPU, one node), there is a note and no finding.
    """
    found = []
    for note in job["notes"]:
        name = note.partition(" ")[0]
        if name in job["plan"] and "changes nothing" in note and "_configs[" in note:
            found.append(Finding(cause="option-changed-nothing", sentence=note, step=0, tensor=name))
    return found
