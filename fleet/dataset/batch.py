"""Batch: what iteration over a dataset yields, tensors by slot."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch

from fleet.dataset.samples import Column, Samples
from fleet.dataset.slots import Slot
from fleet.dataset.text import TextForm

SlotTensors: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"


# The slot's kind, which the caller knows and a type checker does not, decides whether a value is a tensor or a pair.
class Batch(dict[str, Any]):
    """Tensors by slot name, on the host.

    A dense slot is one tensor ``[batch, *shape[1:]]``. A sparse slot is a pair: 1-D values of all samples in sequence,
    and offsets, int64 ``[batch + 1]``; the values of sample i are ``values[offsets[i]:offsets[i + 1]]``.
    ``torch.nn.functional.embedding_bag(..., include_last_offset=True)`` and
    ``torch.nested.nested_tensor_from_jagged`` take this form. Values are int64 or float32, according to the slot. With
    ``input_type=1`` each value of a sparse slot is a row, as in Fleet: the offsets are 0, 1, 2 and so on.

    Attributes:
        ins_ids: ids of the samples, where the dataset has ``parse_ins_id``; empty otherwise.
        contents: their contents, where it has ``parse_content``.
        num_samples: number of samples; with ``input_type=1`` the number of lines, which is 1.
    """

    def __init__(
        self, tensors: dict[str, SlotTensors], ins_ids: list[str], contents: list[str], num_samples: int
    ) -> None:
        super().__init__(tensors)
        self.ins_ids = ins_ids
        self.contents = contents
        self.num_samples = num_samples


def batch_of(samples: Samples, form: TextForm) -> Batch:
    """Returns the samples as one batch; they share no memory that anything writes to."""
    columns = samples.columns[form.first_slot :]
    if form.whole_batches:
        columns = tuple(Column(column.values, np.arange(len(column.values) + 1)) for column in columns)
    tensors = {slot.name: _tensors(slot, column) for slot, column in zip(form.slots, columns, strict=True)}
    ins_ids = samples.columns[0].texts() if form.parse_ins_id else []
    contents = samples.columns[form.first_slot - 1].texts() if form.parse_content else []
    return Batch(tensors, ins_ids, contents, len(samples))


def _tensors(slot: Slot, column: Column) -> SlotTensors:
    values = torch.from_numpy(np.ascontiguousarray(column.values))
    if slot.is_sparse:
        return values, torch.from_numpy(column.offsets)
    return values.view(-1, *slot.dims)
