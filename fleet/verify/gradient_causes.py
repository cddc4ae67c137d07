"""Why the gradients of an update are not those of one process: a factor, the exchange, clipping, or the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from fleet.verify.worker_findings import differing

if TYPE_CHECKING:
    from torch import Tensor

# Name, digest in one process, digest of the whole tensor on the workers.
Pair: TypeAlias = tuple[str, dict[str, Any], dict[str, Any]]

_NEAR = 0.02  # relative, of a factor that counts workers


def nodes_behind(losses: Sequence[Tensor]) -> list[str]:
    """Returns the last operations behind the losses, nearest first; a loss that adds up its samples says so."""
    found: list[str] = []
    waiting = [loss.grad_fn for loss in losses]
    while waiting and len(found) < 16:
        node = waiting.pop(0)
        if node is None:
            continue
        adds_up = getattr(node, "_saved_reduction", 1) == 2
        found.append(node.name() + (" sum" if adds_up else ""))
        waiting += [following for following, _ in node.next_functions]
    return found


def cause_of_factor(
    wrong: Sequence[Pair], pairs: Sequence[Pair], workers: int, nodes: Sequence[str]
) -> tuple[str, str]:
    """Returns the cause and the sentence where the ``wrong`` gradients differ by one factor; ``("", "")`` where not.

    ``pairs`` are all gradients of the update: the others agree, or have the factor too. ``nodes`` are the last
    operations behind the loss.
    """
    ratio = _factor(wrong, pairs)
    if not ratio:
        return "", ""
    which, most = "Each gradient", workers
    if len(wrong) < len(pairs) and _ratio(pairs) is None:
        which, most = f"The gradient of {_listed([name for name, *_ in wrong])}", max(2, round(ratio))
    if most <= workers and abs(ratio / most - 1) < _NEAR:
        return (
            "gradients-summed",
            f"{which} is {most} times that of one process: the gradients of the workers are added up and not divided "
            "by their number.",
        )
    if abs(ratio * workers - 1) >= _NEAR:
        return (
            "accumulation-loss-count",
            f"{which} is {ratio:.4g} times that of one process: the loss or the gradients are divided by the wrong "
            "count.",
        )
    if any(node.endswith(" sum") or node.startswith("SumBackward") for node in nodes):
        return (
            "loss-sum-instead-of-mean",
            f"{which} is 1/{workers} of that of one process: the loss adds up the samples of a worker "
            "(reduction='sum'), and the exchange takes the mean over the workers. Use the mean, or multiply by the "
            "number of workers.",
        )
    return (
        "accumulation-loss-count",
        f"{which} is 1/{workers} of that of one process: the loss is divided by the number of workers, and the "
        "exchange divides by it again.",
    )


def cause_after_backward(
    wrong: Sequence[Pair], pairs: Sequence[Pair], backs: Sequence[dict[str, dict[str, Any]]], n: int
) -> tuple[str, str]:
    """Returns the cause and the sentence where the mean of the workers' gradients was right after ``backward()``.

    ``backs`` are the gradients of each worker then. Where they were equal already, or parts of a tensor, all that
    follows is a change by each worker. Where they were each worker's own, the exchange follows as well: clipping
    before it leaves every worker one share for all tensors, and a wrong exchange has others.
    """
    workers = len(backs)
    factor = _factor(wrong, pairs)
    counts_workers = any(abs(factor / count - 1) < _NEAR for count in (workers, 1 / workers))
    has_parts = any(digest["part"] for own in backs for digest in own.values())
    if factor and (counts_workers or not has_parts):
        return cause_of_factor(wrong, pairs, workers, ())
    if has_parts or _were_exchanged(backs) or _have_one_share(pairs, backs):
        return (
            "gradients-clipped-per-part",
            f"The gradients agree after backward, and at update {n} that of {wrong[0][0]} does not: between the two "
            "each worker scales its part by the norm of that part. Clip with torch.nn.utils.clip_grad_norm_ or "
            "grad_clip, which take the norm of all parts, after the gradients are exchanged.",
        )
    names = [name for name, *_ in wrong]
    return (
        "gradients-not-averaged",
        "After backward() the workers have the gradients of their own samples, whose mean is that of one process. At "
        f"update {n} {_listed(names)} {'has' if len(names) == 1 else 'have'} another one: the exchange between the two "
        "leaves workers or parameters out, or takes them twice.",
    )


def _were_exchanged(backs: Sequence[dict[str, dict[str, Any]]]) -> bool:
    """Returns whether the gradients after the backward pass are equal copies, or parts of whole tensors."""
    return all(differing([own[name] for own in backs if name in own], 1e-5) is None for name in backs[0])


def _have_one_share(pairs: Sequence[Pair], backs: Sequence[dict[str, dict[str, Any]]]) -> bool:
    """Returns whether all gradients are one sum of the workers' own, in which none has more than its part."""
    known = [
        (got["p"], [own[name]["p"] for own in backs]) for name, _, got in pairs if all(name in own for own in backs)
    ]
    if len(known) <= len(backs):  # as many unknown shares: any numbers fit
        return True
    import numpy as np  # here, so that the command starts without it

    left = np.array([own for _, own in known])
    right = np.array([got for got, _ in known])
    shares = np.linalg.lstsq(left, right, rcond=None)[0]
    fits = np.linalg.norm(left @ shares - right) <= 1e-3 * np.linalg.norm(right)
    return bool(fits and all(0 < share <= 1.01 / len(backs) for share in shares))


def _factor(wrong: Sequence[Pair], pairs: Sequence[Pair]) -> float:
    """Returns the factor of all gradients, or of those that are wrong where the others agree; 0 where there is none.

    Of a part only a number of workers counts: other factors of a few tensors have other reasons than a count.
    """
    ratio = _ratio(pairs)
    if ratio is not None or len(wrong) == len(pairs):
        return ratio or 0.0
    ratio = _ratio(wrong) or 0.0
    counts = (round(ratio), 1 / max(1, round(1 / ratio))) if ratio > 0 else ()
    return ratio if any(count and count != 1 and abs(ratio / count - 1) < _NEAR for count in counts) else 0.0


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _ratio(pairs: Sequence[Pair]) -> float | None:
    """Returns the factor between all gradients of both runs; ``None`` where they differ by more than a factor."""
    top = sum(expected["p"] * got["p"] for _, expected, got in pairs)
    bottom = sum(expected["p"] ** 2 for _, expected, _ in pairs)
    if not bottom or not math.isfinite(top):
        return None
    ratio = float(top / bottom)
    off = sum((got["p"] - ratio * expected["p"]) ** 2 for _, expected, got in pairs)
    # Of one parameter there is one projection, which any factor explains; its norm is explained by the right one only.
    if any(abs(got["s"] - ratio**2 * expected["s"]) > 1e-2 * ratio**2 * expected["s"] for _, expected, got in pairs):
        return None
    return ratio if off <= 1e-4 * ratio**2 * bottom and abs(ratio - 1) > 1e-3 else None
