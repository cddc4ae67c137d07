"""Why a run with workers did not end: a collective that not all call, different numbers of steps, an error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet.job.broken_exchange import lost_a_peer
from fleet.verify.paired_runs import Run
from fleet.verify.report import Finding
from fleet.verify.user_lines import is_library

# What Fleet's own checks say, and the cause that it is.
_SAYS = (
    ("no backward pass of the wrapped model has exchanged", "gradients-not-averaged"),
    ("train from different values of", "initial-weights-differ"),
    ("two parameters in the same memory", "tied-weights-apart"),
)


def waiting_findings(many: Run) -> list[Finding]:
    """Returns why the workers did not all come to the end of their steps; an empty list where they did."""
    ranks = range(len(many.records))
    ends = [many.end(rank) for rank in ranks]
    if all(end["how"] in ("stopped", "ended") for end in ends):
        return []
    for end in ends:
        for words, cause in _SAYS:
            if words in end["error"]:
                return [_said(cause, end["error"], many)]
    return _one_sided(many) or uneven_steps(many)


def _said(cause: str, error: str, many: Run) -> Finding:
    text, _, where = error.partition("\n@")
    return Finding(cause=cause, sentence=text.partition(": ")[2][:600], step=_made(many) + 1, where=where)


def _made(many: Run) -> int:
    return min(len(many.updates(rank)) for rank in range(len(many.records)))


def _windows(record: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns the collectives between two updates, for each such time."""
    found: list[list[dict[str, Any]]] = [[]]
    for one in record:
        if one["kind"] == "update":
            found.append([])
        elif one["kind"] == "collective":
            found[-1].append(one)
    return found


def _one_sided(many: Run) -> list[Finding]:
    """Returns the first collective that a worker calls and another, which went on from there, does not."""
    windows = [_windows(record) for record in many.records]
    ends = [many.end(rank) for rank in range(len(windows))]
    for n in range(max(len(own) for own in windows)):
        for rank, own in enumerate(windows):
            for other, theirs in enumerate(windows):
                if other == rank or n >= len(own) or n >= len(theirs):
                    continue
                went_on = n + 1 < len(theirs) or ends[other]["how"] in ("ended", "stopped") or _waits(many, other)
                extra = _extra(own[n], theirs[n])
                if went_on and extra is not None:
                    return [_finding(many, extra, rank, other, n)]
    return []


def _waits(many: Run, rank: int) -> bool:
    end = many.end(rank)
    return bool(many.stacks.get(rank)) or (end["how"] in ("failed", "killed") and not failed_by_itself(end))


def failed_by_itself(end: dict[str, Any]) -> bool:
    """Returns whether a worker ended with an error that no exchange with the others raises."""
    error = end["error"]
    of_exchange = error.startswith(("RendezvousError:", "RuntimeError:", "Dist")) or lost_a_peer(error)
    return end["how"] == "failed" and not of_exchange


def _extra(own: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    for i, one in enumerate(own):
        if i >= len(theirs):
            return one
        if theirs[i]["name"] != one["name"]:
            return one
    return None


def _finding(many: Run, extra: dict[str, Any], rank: int, other: int, n: int) -> Finding:
    place = own_frame(many.stacks.get(other, ()))
    elsewhere = f"worker {other} is at {place}" if place else f"worker {other} goes on without it"
    return Finding(
        cause="collective-on-one-rank",
        sentence=f"Worker {rank} calls {extra['name']} at {extra['where']} after update {n}, and {elsewhere}: every "
        "worker must make this call.",
        step=n,
        rank=rank,
        expected=f"{extra['name']} on every worker",
        received=f"on worker {rank} alone",
        where=extra["where"],
    )


def own_frame(frames: Sequence[str]) -> str:
    """Returns the innermost of ``frames`` in the user's files."""
    return next((frame for frame in frames if not is_library(frame.rpartition(":")[0])), "")


def uneven_steps(many: Run) -> list[Finding]:
    """Returns a finding where some workers came to their end after fewer updates than others began."""
    ranks = range(len(many.records))
    counts = [len(many.updates(rank)) for rank in ranks]
    ended = [rank for rank in ranks if many.end(rank)["how"] == "ended"]
    still = [rank for rank in ranks if rank not in ended]
    if not ended or (not still and len({counts[rank] for rank in ranks}) == 1):
        return []
    few = min(ended, key=lambda rank: counts[rank])
    more = max(still or ranks, key=lambda rank: counts[rank])
    begun = _batches(many, more)
    if not still and counts[more] <= counts[few]:
        return []
    return [
        Finding(
            cause="ranks-take-different-numbers-of-steps",
            sentence=f"Worker {few} ends after {counts[few]} updates and worker {more} begins another one, which waits "
            "for it forever: give every worker the same number of batches.",
            step=counts[few] + 1,
            rank=few,
            expected=begun,
            received=_batches(many, few),
            where=own_frame(many.stacks.get(more, ())) or many.end(more)["error"].partition("\n@")[2],
        )
    ]


def _batches(many: Run, rank: int) -> int:
    return len(many.of_kind(rank, "batch"))
