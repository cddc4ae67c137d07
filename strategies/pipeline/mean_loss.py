"""MeanLoss: says where a loss_fn is no mean over rows, so that micro-batches do not add up to the loss of the batch.

[Note: How it is seen]
A mean over rows gives for two micro-batches together the mean of their own losses. In steps whose number is a power of
two, the first two micro-batches are compared so, without gradients. The function is also called again for each of the
two: if it then returns another value, it depends on more than its arguments (random numbers, a loss that a gate keeps),
and nothing can be said of it. Where the divisor is known to be the number of labels that count, these are counted in
every step.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from fleet.errors import OptionWarning
from fleet.strategies._shared.random_streams import TRACKER

Loss = Callable[[Any, Any], Tensor]
_MOST = 2**26  # numbers of a micro-batch: the copy of two that is compared takes 512 MiB in float32 at most
_ADVICE = (
    "Return (sum of the loss, number of what counts), of which train_batch makes the mean of the batch; or divide by a "
    "number that only the shapes decide, such as labels.numel()."
)


class MeanLoss:
    """Watches the loss functions of a pipeline, and warns once; see [Note: How it is seen]."""

    def __init__(self) -> None:
        self._steps = 0
        self._said = False
        self._looks = False
        self._weights: Sequence[float] = ()
        self._held: tuple[Any, list[Tensor]] | None = None

    def begin(self, losses: Sequence[Loss], labels: Sequence[Any], weights: Sequence[float]) -> None:
        """Takes the labels of the micro-batches of a step, and the weights of their losses."""
        self._held = None
        self._looks = False
        self._weights = weights
        if self._said or len(weights) == 1:
            return
        self._steps += 1
        self._looks = self._steps & (self._steps - 1) == 0
        for loss in losses:
            self._count(loss, labels)

    def look_at(self, losses: Sequence[Loss], micro: int, output: Any, label: Any, values: list[Tensor]) -> None:
        """Takes the ``values`` of the loss functions for a micro-batch, detached; they come in order."""
        if micro > 1 or not self._looks or self._said:
            return
        given = tree_map_only(Tensor, Tensor.detach, (output, label))
        if micro == 0:
            fits = sum(leaf.numel() for leaf in tree_leaves(given) if isinstance(leaf, Tensor)) <= _MOST
            self._held = (given, values) if fits else None
        elif self._held is not None:
            before, first = self._held
            self._held = None
            if (pair := _joined(before, given)) is not None:
                for loss, *own in zip(losses, first, values, strict=True):
                    self._compare(loss, pair, own)

    def _compare(self, loss: Loss, pair: tuple[Any, Any, Any], own: list[Tensor]) -> None:
        try:
            with _unseen(loss):
                whole, *again = (loss(*given).detach().reshape(()) for given in pair)
        except Exception:  # the user's function, on a batch that it need not take
            return
        rounding = _rounding([whole, *own])
        if not all(torch.allclose(a, b, 0, rounding, equal_nan=True) for a, b in zip(own, again, strict=True)):
            return
        a, b = self._weights[:2]
        found = whole.item()
        mean = (own[0].item() * a + own[1].item() * b) / (a + b)
        if math.isfinite(found) and not abs(found - mean) <= rounding:  # a mean that is NaN differs
            self._say(
                f"{_named(loss)} gives {found:.6g} for the first two micro-batches together, and {mean:.6g} is the "
                "mean of their own losses"
            )

    def _count(self, loss: Loss, labels: Sequence[Any]) -> None:
        ignored = _ignored_label(loss)
        if ignored is None or not all(isinstance(y, Tensor) and not y.is_floating_point() for y in labels):
            return
        counts = torch.stack([(y != ignored).sum() for y in labels]).tolist()
        total = sum(counts)
        if total and any(abs(n / total - w) > 1e-9 for n, w in zip(counts, self._weights, strict=True)):
            self._say(
                f"{_named(loss)} divides by the number of labels that are not {ignored}, and the micro-batches of a "
                f"batch have {', '.join(map(str, counts))} of them"
            )

    def _say(self, seen: str) -> None:
        if self._said:
            return
        self._said = True
        warnings.warn(
            f"loss_fn is not a mean over rows: {seen}. train_batch averages the losses of the micro-batches by their "
            f"rows, so this loss and its gradients are not those of the whole batch in one piece. {_ADVICE}",
            OptionWarning,
            stacklevel=2,
        )


def _joined(first: Any, second: Any) -> tuple[Any, Any, Any] | None:
    """Returns both together, and each alone, of one copy; ``None`` where not every tensor has the rows in dim 0."""
    ours, form = tree_flatten(first)
    theirs, other = tree_flatten(second)
    rows = []
    for leaves in (ours, theirs):
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in tensors}
        if len(sizes) != 1 or 0 in sizes:
            return None
        rows.append(sizes.pop())
    if form != other:
        return None
    whole = []
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if a is not b and a != b:
                return None
            whole.append(a)
        elif a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
            return None
        else:
            whole.append(torch.cat([a, b]))
    parts = [
        [leaf[where] if isinstance(leaf, Tensor) else leaf for leaf in whole]
        for where in (slice(None), slice(rows[0]), slice(rows[0], None))
    ]
    together, before, after = (tree_unflatten(leaves, form) for leaves in parts)
    return together, before, after


@contextmanager
def _unseen(loss: Loss) -> Iterator[None]:
    """Disables gradients inside; afterwards random streams and the buffers of ``loss`` are as before."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    buffers = list(loss.buffers()) if isinstance(loss, nn.Module) else []
    kept = [buffer.clone() for buffer in buffers]
    streams = TRACKER.get_states_tracker()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices), _without_compiling():
            yield
    finally:
        TRACKER.set_states_tracker(streams)
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.detach().copy_(value)


@contextmanager
def _without_compiling() -> Iterator[None]:
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and its import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _ignored_label(loss: Loss) -> int | None:
    """Returns the label that torch's ``loss`` leaves out of its mean."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.ignore_index if loss.reduction == "mean" else None
    function, given = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    if function not in (F.cross_entropy, F.nll_loss) or given.get("reduction", "mean") != "mean":
        return None
    return int(given.get("ignore_index", -100))


def _rounding(values: list[Tensor]) -> float:
    """Returns by how much equal losses may differ; a value that a narrower type holds was rounded to it."""
    dtype = values[0].dtype
    for narrow in (torch.float16, torch.bfloat16):
        if all(bool(value.to(narrow) == value) for value in values):
            dtype = narrow
    eps = torch.finfo(dtype).eps
    scale = max((abs(value.item()) for value in values if value.isfinite()), default=0.0)
    return (4 if dtype.itemsize == 2 else 100) * eps * scale + 10 * eps


def _named(loss: Loss) -> str:
    function = loss.func if isinstance(loss, partial) else loss
    code = getattr(function, "__code__", None)
    where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    return f"{getattr(function, '__name__', type(function).__name__)}{where}"
