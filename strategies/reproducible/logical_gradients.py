"""LogicalGradients: the gradients of one optimizer, kept by logical worker until the last of an update has them.

[Note: The way of a logical gradient]
A backward pass fills ``.grad`` as ever. At its end the gradients are set aside, so that code between ``backward()``
and ``step()`` finds none that are incomplete; ``step()`` puts them into the tree as those of the logical worker whose
turn it is. In the last turn they are exchanged while backward runs, bucket by bucket, and ``.grad`` holds the gradient
of the whole update when it ends: clipping, loss scaling and the update rule see what one process would see. A second
backward pass in that turn exchanges again, from the same sums of the earlier turns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fleet.errors import CheckpointError, ConfigError
from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies._gradients.accumulator import Accumulator
from fleet.strategies._gradients.flat import chunks
from fleet.strategies._gradients.reducer import overlapped_buckets
from fleet.strategies._gradients.set_aside import SetAside
from fleet.strategies.reproducible.batch_counts import BatchCounts
from fleet.strategies.reproducible.same_kernels import warn_of_other_kernels
from fleet.strategies.reproducible.tree_bucket import TreeBucket

_MIB = 1024 * 1024
_AGREED = 1021  # what all must agree on, as a number whose sum over thousands of workers is exact in float32


class LogicalGradients(SetAside):
    """The gradients since the last update of one optimizer; see [Note: The way of a logical gradient].

    Args:
        everyone: the accumulators of all optimizers.
        logical: the logical workers.
        group: the processes; ``None`` with one.
        bucket_MiB: the size of what travels at once.
        last_bucket_MiB: the same of what travels last.
        averages: divide the sum by the number of batches.
    """

    def __init__(
        self, everyone: Sequence[Accumulator], logical: LogicalWorkers, group: Any, *, bucket_MiB: float,
        last_bucket_MiB: float, averages: bool,
    ) -> None:  # fmt: skip
        hosted = len(logical.ranks)
        super().__init__("reproducible", everyone, per_update=hosted * logical.rounds_per_update, average=False)
        self._logical = logical
        self._group = group
        self._bucket_bytes = bucket_MiB * _MIB
        self._last_bucket_bytes = last_bucket_MiB * _MIB
        self._averaged = float(logical.num * logical.rounds_per_update) if averages else 1.0
        self._counts = BatchCounts(logical, group)
        self._buckets: list[TreeBucket] = []
        self._bucket_of: dict[Tensor, TreeBucket] = {}
        self._next = 0  # the bucket that is sent next
        self._sends = False  # the pass under way is one of the last turn
        self._exchanged = False
        self._agreed_before = 0  # of earlier rounds of this update
        self._old: dict[Tensor, Tensor] = {}  # gradients of earlier updates, which nobody has cleared
        self._hooks: list[Any] = []
        logical.ends.append(self._check_stepped)

    # ---- whose turn -----------------------------------------------------------------------------------------------

    @property
    def ends_round(self) -> bool:
        """Whether the next ``step()`` is this process's last one of its round."""
        return (self.steps + 1) % len(self._logical.ranks) == 0

    def _check_stepped(self) -> None:
        """Raises ConfigError where a loop goes on to its next batch and has not stepped on this one."""
        if self.pending or (self._logical.is_last and self.steps % len(self._logical.ranks)):
            raise ConfigError(
                f"The loop asks for its next batch, and optimizer.step() was not called on that of logical worker "
                f"{self._logical.rank}. With 'reproducible' every batch is followed by step(), which updates at the "
                "last one of an update. To merge batches, set strategy.gradient_merge; to skip one, multiply its loss "
                "by 0."
            )

    def _check_turn(self, call: str) -> None:
        logical = self._logical
        if not logical.is_open:
            raise ConfigError(
                f"{call} on a batch that belongs to no logical worker: with 'reproducible' the rows of a batch must "
                "not depend on the number of workers. Use fleet.elastic.ElasticSampler(data, batch_size=B) and iterate "
                "over sampler.batches(loader) in place of a DistributedSampler, or over a data set of Fleet; for data "
                "of your own, run the loop once for each rank in fleet.elastic.logical_ranks()."
            )
        if self.steps % len(logical.ranks) != logical.place:
            raise ConfigError(
                f"{call} on the batch of logical worker {logical.rank}, and {self.steps % len(logical.ranks)} of this "
                f"round's batches were stepped on before it, where {logical.place} are due: call step() of every "
                "optimizer once on each batch of an update, or on none."
            )

    # ---- a backward pass ------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begins a backward pass."""
        if self._running:
            return
        self._check_turn("backward() was called")
        self._running = True
        torch.autograd.Variable._execution_engine.queue_callback(self._set_aside)
        self._notice_clear()
        if self._zeros is not None:
            self._zeros.grad = None
            self._zeros = None
        if not self.steps and not self.pending:
            self._plan()
            self._old = {p: p.grad for p in self._accumulators if p.grad is not None}
        for parameter in self._accumulators:
            parameter.grad = None
        self._sends = self.ends_round
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = set(bucket.parameters)

    def arrived(self, parameter: Tensor, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the ``gradients`` that are about to reach ``parameter``."""
        self.begin_pass()
        if parameter not in self._bucket_of:
            raise ConfigError(
                "A parameter was unfrozen in the middle of an update. With 'reproducible' the same parameters train in "
                "all batches of an update: unfreeze it where fleet.update_loss(loss) has returned a number."
            )
        if any(g is not None and g.is_sparse for g in gradients):
            raise ConfigError(
                "'reproducible' adds gradients in a fixed order, and sums of sparse ones have another in each job. "
                "Give the embedding sparse=False."
            )
        return gradients

    def _plan(self) -> None:
        """Divides the parameters that train into buckets, unless they are the same as before."""
        trained = [p for p in self._parameters() if p.requires_grad]
        if trained == list(self._bucket_of) and self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._buckets = [
            TreeBucket(some, self._logical, self._group)
            for same in chunks(list(reversed(trained)), float("inf"))
            for some in overlapped_buckets(same, self._bucket_bytes, self._last_bucket_bytes)
        ]
        found = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        self._bucket_of = {p: found[p] for p in trained}
        arrived = partial(_complete, weakref.ref(self))
        self._hooks = [p.register_post_accumulate_grad_hook(arrived) for p in trained]

    def complete(self, parameter: Tensor) -> None:
        """Sends the buckets whose gradients are complete, in the last turn; ``parameter`` has just got its own."""
        if not (self._sends and self._running):
            return
        self._bucket_of[parameter].waiting.discard(parameter)
        # A later bucket may be full first and waits: all processes start their exchanges in one order.
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._send_next(self._present)

    def _present(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient of ``parameter`` in this turn, also of earlier backward passes."""
        earlier = self.pending.get(parameter)
        now = parameter.grad
        return now if earlier is None else earlier if now is None else earlier + now

    @torch.no_grad()
    def _send_next(self, gradient_of: Callable[[Tensor], Tensor | None]) -> None:
        bucket = self._buckets[self._next]
        found = {p: g for p in bucket.parameters if (g := gradient_of(p)) is not None}
        bucket.send(self._logical.rank, found, self._agreed(), self._next)
        self._next += 1

    def _agreed(self) -> int:
        return (self._logical.seed + self._logical.round) % _AGREED

    @torch.no_grad()
    def _set_aside(self, exchanged: bool = False) -> None:
        """Ends a backward pass: sets its gradients aside, and exchanges those of the last turn."""
        self._running = False
        for parameter in self._accumulators:
            if parameter.grad is not None:
                earlier = self.pending.get(parameter)
                self.pending[parameter] = parameter.grad if earlier is None else earlier.add_(parameter.grad)
                parameter.grad = None
        if self._sends:
            self._exchange()
        if not self.is_last:
            self._mark()

    def _mark(self) -> None:
        """Gives the smallest parameter a gradient of zeros, for code that clips."""
        self._zeros = min(self._accumulators, key=Tensor.numel)
        self._zeros.grad = torch.zeros_like(self._zeros)

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchanges what was not sent yet; ``.grad`` is the update's where the round completes one."""
        while self._next < len(self._buckets):
            self._send_next(self.pending.get)
        self._exchanged = True
        if not self.is_last:
            for bucket in self._buckets:
                bucket.reduce()
            return
        divisor = self._counts.divisor(self._averaged)
        for bucket in self._buckets:
            bucket.reduce()
            bucket.gather(divisor)
        for bucket in self._buckets:
            gradients, agreed = bucket.finish()
            self._check_agreed(bucket, agreed * divisor)
            for parameter, gradient in gradients.items():
                old = self._old.get(parameter)
                parameter.grad = gradient if old is None else old + gradient
        for parameter, old in self._old.items():
            parameter.grad = old if parameter.grad is None else parameter.grad

    def _check_agreed(self, bucket: TreeBucket, agreed: float) -> None:
        if bucket.parameters[0].dtype not in (torch.float32, torch.float64):
            return  # a sum of narrower numbers is not exact
        expected = self._logical.num * (self._agreed_before + self._agreed())
        if abs(agreed - expected) > 0.5:
            raise ConfigError(
                "The workers exchange gradients of different updates, or with different seeds: torch.manual_seed() was "
                "called after distributed_model() with a seed that depends on the rank. Give all workers one seed: "
                "with 'reproducible' each logical worker draws its own numbers from it."
            )

    # ---- step() ---------------------------------------------------------------------------------------------------

    def end_batch(self) -> bool:
        """Ends a turn; returns whether it completes an update, and the gradients of all its batches are in ``.grad``.

        Raises ConfigError when the batch belongs to no turn, or a gradient was written that no update would see.
        """
        self._check_turn("step() was called")
        if not self.steps and not self._buckets:
            self._plan()  # a first batch without a backward pass
        ends_round = self.ends_round
        if ends_round and not self._exchanged:
            self._next = 0
            self._exchange()  # a batch without a backward pass; the others wait
        self._counts.note_batch()
        rank = self._logical.rank
        agreed = self._agreed()
        is_last = Accumulator.end_batch(self)
        self._running = self._sends = False
        self._watch(self._frozen)
        self._notice_clear()
        for bucket in self._buckets:
            if not ends_round:
                with torch.no_grad():
                    bucket.add(rank, self.pending, agreed)
                continue
            if not is_last:
                bucket.keep()
            bucket.clear()
        if ends_round:
            self._agreed_before += agreed
        self.pending = {}
        self._exchanged = False
        return is_last

    def end_update(self) -> None:
        """Starts anew after an update."""
        Accumulator.end_update(self)
        self._old = {}
        self._agreed_before = 0
        self._counts.clear()
        for bucket in self._buckets:
            bucket.drop_merged()

    def clear(self) -> None:
        """Drops the gradients of the present batch; called when ``.grad`` was cleared."""
        super().clear()
        self._old = {}

    def give(self, parameters: Iterable[Tensor]) -> None:
        """Releases ``parameters``, which another optimizer has now."""
        super().give(parameters)
        if self.lost:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
            self._buckets = []
            self._bucket_of = {}
            self.pending = {}
            self.steps = 0

    # ---- state ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Returns the place in the job's random numbers; raises ConfigError in the middle of an update."""
        if self.steps:
            raise ConfigError(
                f"The optimizer's state was asked for after {self.steps} of {self.per_update} batches of an update. "
                "With 'reproducible' save where fleet.update_loss(loss) returns a number, or by Checkpoint(every=...)."
            )
        state = self._logical.state()
        state["round"] += self._logical.is_open  # this turn's step() was the last one of its round
        return {self.option: {**state, "kernels": self._logical.kernels}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError for the state of a job with another number of logical workers."""
        saved = state.get(self.option)
        if saved is not None and saved["logical_workers"] != self._logical.num:
            raise CheckpointError(
                f"The optimizer's state is that of {saved['logical_workers']} logical workers, and "
                f"reproducible_configs['logical_workers'] is {self._logical.num}. They stay the same for the whole "
                "training; the number of processes may change."
            )

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on where the state was saved."""
        saved = state.get(self.option)
        self.pending = {}
        self.steps = 0
        if saved is None:
            return
        warn_of_other_kernels(saved["kernels"], self._logical.kernels)
        self._logical.load(saved)


def _complete(gradients: weakref.ref[LogicalGradients], parameter: Tensor) -> None:
    """Runs after a gradient was added to ``.grad``."""
    found = gradients()
    if found is not None and parameter in found._bucket_of:
        found.complete(parameter)
