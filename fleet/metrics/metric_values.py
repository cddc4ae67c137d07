"""Shared parts of the metrics over all workers: checks of what they are given, and sums over the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fleet.common.host_array import host_array
from fleet.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet.job.util import HostArray, UtilBase

    Array = np.ndarray[Any, np.dtype[Any]]


def checked_batch(call: str, pred: Any, label: Any) -> tuple[Array, Array]:
    """Returns the probabilities (float64) and labels of one batch, both flat.

    Raises ConfigError for shapes that do not match, what is no number, a prediction outside [0, 1], a label other than
    0 and 1.
    """
    scores = numbers_of(f"{call}(pred)", pred)
    scores = scores[:, 1] if scores.ndim == 2 and scores.shape[1] == 2 else scores.reshape(-1)
    labels = numbers_of(f"{call}(label)", label).reshape(-1)
    if scores.shape != labels.shape:
        raise ConfigError(f"{call}(): {scores.size} predictions and {labels.size} labels.")
    if not bool(np.all((scores >= 0.0) & (scores <= 1.0))):
        raise ConfigError(f"{call}(pred): predictions are probabilities, from 0 to 1; some are not.")
    if not bool(np.all((labels == 0) | (labels == 1))):
        raise ConfigError(f"{call}(label): labels are 0 or 1; some are not.")
    return scores, labels


def places_of(scores: Array, bins: int | None) -> Array:
    """Returns the place of each probability in the order of all, int64: its part of ``bins``, or its float32 bits."""
    if bins is not None:
        # A prediction of exactly 1 belongs to the last part.
        return np.minimum((scores * bins).astype(np.int64), bins - 1)
    # The bits of numbers from 0 up are in the order of the numbers; adding 0 turns -0 into 0.
    return (scores.astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)


def array_of(argument: str, value: Any) -> Array:
    """Returns a tensor, an array or lists as an array; raises ConfigError for lists of different lengths."""
    found = host_array(value)
    try:
        return np.asarray(found)
    except ValueError:
        raise ConfigError(f"{argument}: takes rows of one length; some are shorter than others.") from None


def numbers_of(argument: str, values: Any) -> Array:
    """Returns real numbers as float64 of their shape; raises ConfigError for anything else."""
    array = array_of(argument, values)
    if array.dtype.kind not in "biuf" and array.size:
        raise ConfigError(f"{argument}: takes real numbers, got dtype {array.dtype}.")
    return array.astype(np.float64)


def ids_of(argument: str, ids: Any) -> Array:
    """Returns ids as int64 of their shape, unsigned ones by their bits; raises ConfigError for what are no integers."""
    array = array_of(argument, ids)
    if array.dtype.kind not in "iu" and array.size:
        hint = (
            "Give np.array(ids, np.uint64): numpy makes floats of a list with numbers from 2**63 on and smaller ones."
            if array.dtype.kind in "fO"
            else "Hash texts before."
        )
        raise ConfigError(f"{argument}: ids are integers, got dtype {array.dtype}. {hint}")
    return array.astype(np.uint64).view(np.int64) if array.dtype.kind == "u" else array.astype(np.int64)


def check_state(stat: object, state: Mapping[str, Any], *names: str) -> None:
    """Raises CheckpointError when ``state`` is no ``state_dict()`` of ``stat``, whose state has the keys ``names``."""
    if not set(names) <= set(state):
        raise CheckpointError(f"{type(stat).__name__} loads its own state_dict(), got the keys {sorted(state)}.")


def area_under(pos: Array, neg: Array) -> float:
    """Returns the area under the ROC curve of two histograms, from the lowest prediction up; 0.5 without a class."""
    # From the highest prediction down, so that the running sum counts the positives above each bucket.
    pos = pos[::-1].astype(np.float64)
    neg = neg[::-1].astype(np.float64)
    num_pos = float(pos.sum())
    num_neg = float(neg.sum())
    if num_pos == 0.0 or num_neg == 0.0:
        return 0.5
    above = np.cumsum(pos)
    # Samples of one bucket are ties, and half of their pairs count.
    area = float(np.dot(neg, above - pos / 2.0))
    return area / (num_pos * num_neg)


def util_of(util: UtilBase | None, scope: object = None) -> UtilBase:
    """Returns ``util``, or ``fleet.util`` without one. Raises ConfigError for a scope."""
    if scope is not None:
        raise ConfigError(f"scope={scope!r}: torch has no scopes. Pass the value itself and omit scope.")
    if util is not None:
        return util
    import fleet

    found: UtilBase = fleet.util
    return found


def reduced(util: UtilBase, value: Any, mode: str = "sum") -> HostArray:
    """Reduces over the workers; workers that hold one copy of the model together see one batch and count once."""
    reduce = getattr(util, "reduce_replicas", None) or util.all_reduce  # a user's util may have the second only
    return reduce(value, mode)
