"""SameRows: whether the workers that hold one copy of the model together were given the same rows."""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fleet.checks.comparison import checksums, digest, ranks_by
from fleet.errors import ConfigError, OptionWarning, RendezvousError
from fleet.job.axes import MODEL_AXES, SEQUENCE_AXES, Axes
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.whereabouts import named
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._shared.casts import nested_tensors
from fleet.strategies._shared.exchanged_texts import gather_texts

_NUMBERS = 1 << 16  # of a tensor
_BATCHES = 3  # a sampler with the wrong rank is wrong from the first batch


class SameRows(Listener):
    """Compares the first batches of each model on the workers along ``mp`` and ``pp``.

    Args:
        job: the workers, and where they stand.
        batches: the number of batches of a model to compare.
    """

    def __init__(self, job: Job, batches: int = _BATCHES) -> None:
        self._job = job
        self._batches = batches
        self._compared: weakref.WeakKeyDictionary[WrappedModel, int] = weakref.WeakKeyDictionary()

    def rows_given(self, model: WrappedModel, data: Any, call: str) -> None:
        """Compares ``data``, see :func:`check_rows`."""
        number = self._compared.get(model, 0)
        if number < self._batches:
            self._compared[model] = number + 1
            check_rows(data, call, self._job.axes, self._job.device)


def check_rows(data: Any, call: str, axes: Axes, device: torch.device) -> None:
    """Raises ConfigError on all workers of one copy where ``data``, which ``call`` was given, differs; collective.

    An entry that a worker does not have (a stage in the middle may be given ``None``) is not compared.

    Args:
        data: tensors, and lists and dictionaries of them.
        call: the user's.
        axes: the place of this worker.
        device: where the workers can exchange numbers.
    """
    group = axes.group(*MODEL_AXES)
    if group is None:
        return
    texts = gather_texts(json.dumps(digests(data)), group, device)
    said = dict(zip(axes.ranks(*MODEL_AXES), map(json.loads, texts), strict=True))
    # In the order of the ranks, so that every worker names the same first difference.
    for place in dict.fromkeys(place for found in said.values() for place in found):
        by_digest = ranks_by({rank: found[place] for rank, found in said.items() if place in found})
        if len(by_digest) > 1:
            raise ConfigError(different_rows(call, list(by_digest.values()), axes))


class Attended:
    """The calls of one attention by one group of workers: their number, and the shapes of the last."""

    def __init__(self) -> None:
        self.calls = 0
        self.shapes: list[list[int]] = []


class SameSequences(Listener):
    """Compares the rows from which the workers along ``sep`` and ``cp`` cut their tokens, before the first forwards.

    The inputs of forward are other tokens on each of them; the whole rows are seen where the script splits them.

    Args:
        job: the workers, and where they stand.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._axes = job.axes
        self._device = job.device
        self._left = _BATCHES if job.axes.size(*SEQUENCE_AXES) > 1 else 0
        self._noted: set[str] = set()
        self._looks = True
        self._attended: dict[tuple[str, tuple[int, ...]], Attended] = {}
        self.sleeps = job.axes.size(*SEQUENCE_AXES) == 1

    def before_forward(self, model: WrappedModel) -> None:
        """Compares the rows before a forward that trains."""
        if self._left and torch.is_grad_enabled() and model.training:
            self.check()

    def note(self, tensor: Tensor) -> None:
        """Remembers the whole rows ``tensor`` until the next forward; called where a worker takes its tokens."""
        # Under torch.compile the tensor has no values yet.
        if self._left and not torch.compiler.is_compiling():
            self._noted.update(digests([tensor]).values())

    def check(self) -> None:
        """Raises ConfigError on all of them where each has split rows that another has not; a collective call.

        A worker that has split more, or nothing, may have done so for itself.
        """
        group = self._axes.group(*SEQUENCE_AXES) if self._left else None
        if group is None:
            return
        self._left -= 1
        texts = gather_texts(json.dumps(sorted(self._noted)), group, self._device)
        self._noted.clear()
        ranks = self._axes.ranks(*SEQUENCE_AXES)
        ranks_of = ranks_by({rank: frozenset(json.loads(text)) for rank, text in zip(ranks, texts, strict=True)})
        if any(a - b and b - a for a in ranks_of for b in ranks_of):
            raise ConfigError(different_rows("split_inputs_sequence_dim()", list(ranks_of.values()), self._axes))

    def check_shapes(self, tensors: Sequence[Tensor], group: Any, call: str) -> None:
        """Raises ConfigError where the workers of ``group`` give ``call`` other shapes; a collective call.

        They are compared in the first call and where they change: an exchange of other sizes aborts or waits.
        """
        if torch.compiler.is_compiling() or self._job.roll_call is None:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        seen = self._attended.setdefault((call, ranks), Attended())
        seen.calls += 1
        shapes = [list(tensor.shape) for tensor in tensors]
        if shapes == seen.shapes:
            return
        seen.shapes = shapes
        advice = (
            "Each holds the same number of tokens of the same rows: pad sequences to a multiple of the workers, and "
            "cut them with fleet.meta_parallel.split_inputs_sequence_dim()."
        )
        try:
            # The number of the call is a part of the meeting: workers whose shapes changed at different calls do not
            # meet, and get the error below in place of a comparison of two calls.
            texts = self._job.roll_call.meet_some(ranks, seen.calls, call, json.dumps(shapes))
        except RendezvousError as error:
            raise ConfigError(
                f"{call} got tensors of the shapes {shapes} here, others than in the call before, and on some workers "
                f"along the sequence the shapes did not change with them. {advice}"
            ) from error
        if len(set(texts)) > 1:
            said = ", ".join(f"{text} on rank {rank}" for rank, text in zip(ranks, texts, strict=True))
            raise ConfigError(f"{call} got tensors of different shapes on the workers: {said}. {advice}")

    def look_at(self, queries: Tensor, group: Any, call: str) -> None:
        """Warns where the first ``queries`` of an attention are the same on all of ``group``; a collective call."""
        if not self._looks or torch.compiler.is_compiling():
            return
        # Once: the look waits for the device and exchanges a message.
        self._looks = False
        texts = gather_texts(json.dumps(digests([queries])), group, self._device)
        if len(set(texts)) == 1 and not torch.equal(queries, queries[:, :1].expand_as(queries)):
            warnings.warn(
                f"{call} got the same queries on all workers of a sequence: they hold the same tokens, where each "
                "should hold its part. Cut the rows with fleet.meta_parallel.split_inputs_sequence_dim() along sep, "
                "and with split_inputs_sequence_dim_load_balance() along cp.",
                OptionWarning,
                stacklevel=4,
            )


def different_rows(call: str, groups: list[list[int]], axes: Axes) -> str:
    """Returns what to say of workers that must see the same rows and were given others; ``groups`` got equal ones."""
    listed = "; other rows on ".join(named(ranks, axes.described) for ranks in groups)
    return (
        f"{call} was given different rows on workers that hold one copy of the model together: some on {listed}. "
        "They must get the same rows. Use fleet.elastic.ElasticSampler, or torch's DistributedSampler(data, "
        "num_replicas=fleet.data_replicas(), rank=fleet.data_rank()); the rank and the number of all workers are "
        "right only without mp, pp, sep and cp. Draw random augmentations alike on these workers."
    )


def first_rows(batch: Any) -> str:
    """Returns a text that differs where the first numbers of the tensors of ``batch`` do; empty where it has none."""
    tensors = [tensor for tensor in nested_tensors(batch) if tensor.layout is torch.strided]
    return digest(digests([tensor.reshape(-1)[:_NUMBERS] for tensor in tensors])) if tensors else ""


def digests(data: Any) -> dict[str, str]:
    """Returns a short text for each tensor of ``data`` by its place, which differs where shapes or bits do."""
    tensors = {f"{at}": leaf for at, leaf in enumerate(tree_leaves(data)) if isinstance(leaf, Tensor)}
    sums = checksums(tensors)
    return {at: digest({"shape": list(t.shape), "type": f"{t.dtype}", "sum": sums[at]}) for at, t in tensors.items()}
