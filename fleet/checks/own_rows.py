"""OwnRows: each replica trains on other rows than the rest, in a new order in each epoch, and steps."""

from __future__ import annotations

import sys
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from fleet.checks.comparison import listed_ranks, ranks_by
from fleet.checks.said_once import SaidOnce
from fleet.checks.same_rows import first_rows
from fleet.errors import OptionWarning
from fleet.job.axes import DATA_AXES
from fleet.job.job import Job
from fleet.job.listener import Listener
from fleet.job.whereabouts import user_line
from fleet.job.wrapped_model import WrappedModel


@dataclass
class _LoaderLoop:
    """One loop over a DataLoader: where it is, how many steps it has made, and whether it repeats an earlier order."""

    line: str
    sampler: Any  # torch's DistributedSampler that shuffles, or None
    steps: int = 0
    repeats: bool = False


class OwnRows(Listener):
    """Looks at the torch DataLoaders that a loop trains from, and warns once of each call that the script forgot.

    Args:
        job: the workers, and where they stand.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.sleeps = True
        self._loops: weakref.WeakKeyDictionary[Any, _LoaderLoop] = weakref.WeakKeyDictionary()
        self._loop: _LoaderLoop | None = None
        self._epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # that were trained, by sampler
        self._begun: set[int] = set()  # data sets, by id
        self._batch: Any = None
        self._rows = SaidOnce(job, "rows")
        self._has_seen_rows = False
        self._said: set[str] = set()

    def model_wrapped(self, model: WrappedModel) -> None:
        """Looks from now on, where there are several replicas."""
        if self._job.collective and self._job.data_replicas > 1 and self._job.roll_call is not None:
            self._job.listeners.wake(self)

    def batch_given(self, batches: Any, batch: Any) -> None:
        """Notes the loop, and until rows were compared its batch."""
        # An iterator that gives its first batch begins a loop; a script may hold several at once.
        if batches._num_yielded == 1:
            self._loops[batches] = self._begin(id(batches._dataset), batches._index_sampler)
        self._loop = self._loops.get(batches)
        if not self._has_seen_rows:
            self._batch = batch

    def before_forward(self, model: WrappedModel) -> None:
        """Posts the rows of the first batch that trains."""
        if self._batch is None or not (torch.is_grad_enabled() and model.training):
            return
        rows = first_rows(self._batch)
        self._batch = None
        self._has_seen_rows = True
        if rows:
            self._rows.say(rows)

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Warns of equal rows, and of an order that was trained before."""
        self._compare()
        loop = self._loop
        if loop is None:
            return
        loop.steps += 1
        if loop.steps == 2 and loop.sampler is not None:  # one step over all rows has no order
            self._epochs[loop.sampler] = loop.sampler.epoch
            if loop.repeats:
                self._warn(
                    f"{loop.line}: this epoch has the order of an earlier one, because DistributedSampler shuffles by "
                    f"its epoch, which is {loop.sampler.epoch} again. Call sampler.set_epoch(epoch) before each loop, "
                    "or use fleet.elastic.ElasticSampler, which counts by itself."
                )

    def _begin(self, data: int, indices: Any) -> _LoaderLoop:
        line = user_line()
        job = self._job
        stands = job.optimizers and not (job.num_steps or job.updating)  # a closure may loop before its first step ends
        stands = stands and job.logical is None  # an update may take several loops, and no batch goes without its step
        if data in self._begun and stands and any(model._passes.begun for model in job.models):
            self._warn(
                f"{line}: a whole loop over the data has called backward(), and the optimizer that "
                "distributed_optimizer() returned has not stepped. Call optimizer.step() after backward()."
            )
        self._begun.add(data)
        sampler = getattr(indices, "sampler", indices)
        kind: Any = getattr(sys.modules.get("torch.utils.data.distributed"), "DistributedSampler", None)
        orders = kind is not None and isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__
        if not orders or not sampler.shuffle:
            return _LoaderLoop(line, None)
        return _LoaderLoop(line, sampler, repeats=self._epochs.get(sampler) == sampler.epoch)

    def _compare(self) -> None:
        said = self._rows.heard(self._job.axes.ranks(*DATA_AXES)) if self._rows.line else {}
        same = max(ranks_by(said).values(), key=len, default=[])
        if len(same) > 1:
            self._warn(
                f"{self._rows.line}: {listed_ranks(same)} train on the same rows: the first batches that their "
                "DataLoaders gave are bit-equal. Give the DataLoader sampler=DistributedSampler(data, num_replicas="
                "fleet.data_replicas(), rank=fleet.data_rank()) or fleet.elastic.ElasticSampler(data); an "
                "IterableDataset leaves out the rows of the others itself."
            )

    def _warn(self, text: str) -> None:
        """Warns once; worker 0 speaks for all."""
        if self._job.global_rank == 0 and text not in self._said:
            self._said.add(text)
            warnings.warn(text, OptionWarning, stacklevel=4)
