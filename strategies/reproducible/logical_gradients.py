"""LogicalGradients: the gradients of one optimizer, kept by logical worker until the last of an update has them.

[Note: The way of a logical gradient]
A backward pass fills ``.grad`` as ever. At its end the gradients are set aside, so that code between ``backward()``
and ``step()`` finds none that are incomplete; ``step()`` puts them into the tree as those of the logical worker whose
turn it is. In the last turn they are exchanged while backward runs, bucket by bucket, and ``.grad`` holds the gradient
of the whole update when it ends: clipping, loss scaling and the update rule see the gradient of one process. A second
backward pass in that turn exchanges again, from the same sums of the earlier turns.

With several optimizers a backward pass may reach parameters of one on some workers and of another on others. Then the
workers say at its end which optimizers have gradients, and exchange those of one after the other, in one order.

The parameters change in the last turn of an update. A backward pass that follows a ``step()`` in its turn, as that of
a generator's loss through a discriminator, would see them changed on the processes whose last turn it is, and as they
were on the others: it is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.errors import CheckpointError, ConfigError
from fleet.job.logical_workers import LogicalWorkers
from fleet.strategies._gradients.accumulator import Accumulator
from fleet.strategies._gradients.flat import chunks
from fleet.strategies._gradients.reducer import overlapped_buckets
from fleet.strategies._gradients.set_aside import SetAside
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.reproducible.batch_counts import BatchCounts
from fleet.strategies.reproducible.same_kernels import warn_of_other_kernels
from fleet.strategies.reproducible.tree_bucket import TreeBucket

_MIB = 1024 * 1024
_AGREED = 1021  # all agree on a number below it, whose sum over thousands of workers is exact in float32


class LogicalGradients(SetAside):
    """The gradients since the last update of one optimizer; see [Note: The way of a logical gradient].

    Args:
        everyone: the accumulators of all optimizers.
        logical: the logical workers.
        group: the processes; ``None`` with one.
        bucket_MiB: the size of what travels at once.
        last_bucket_MiB: the same of what travels last.
        divisor: the sum is divided by it, unless ``fleet.mean`` has given counts.
        notes_pass: called when a backward pass begins.
    """

    def __init__(
        self, everyone: Sequence[Accumulator], logical: LogicalWorkers, group: Any, *, bucket_MiB: float,
        last_bucket_MiB: float, divisor: float, notes_pass: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        hosted = len(logical.ranks)
        super().__init__("reproducible", everyone, per_update=hosted * logical.rounds_per_update, average=False)
        self._logical = logical
        self._group = group
        self._bucket_bytes = bucket_MiB * _MIB
        self._last_bucket_bytes = last_bucket_MiB * _MIB
        self._divisor = divisor
        self._notes_pass = notes_pass
        self._counts = BatchCounts(logical, group)
        self._buckets: list[TreeBucket] = []
        self._bucket_of: dict[Tensor, TreeBucket] = {}
        self._next = 0  # the bucket that is sent next
        self._sends = False  # the pass under way is one of the last turn
        self._exchanged = False
        self._was_dropped = False  # the loop has cleared gradients that were exchanged
        self._waits = False  # for the exchange, at the end of the pass
        self._has_stepped = False
        self._stepped = 0  # turns of the present round that have had their step()
        self._place = len(everyone)
        self._agreed_before = 0  # of earlier rounds of this update
        self._old: dict[Tensor, Tensor] = {}  # gradients of earlier updates, which nobody has cleared
        self._hooks: list[Any] = []
        self.settings_of: Callable[[], dict[str, Any]] = dict
        self._settings_digest = 0  # of the learning rates and other settings with which the update began
        logical.begins.append(self._begin_turn)
        logical.ends.append(self._check_stepped)

    # ---- whose turn -----------------------------------------------------------------------------------------------

    @property
    def ends_round(self) -> bool:
        """Whether the next ``step()`` is this process's last one of its round."""
        return (self.steps + 1) % len(self._logical.ranks) == 0

    @property
    def has_stepped(self) -> bool:
        """Whether ``step()`` was called in the present turn."""
        return self._has_stepped and self._logical.is_open

    def _begin_turn(self, rank: int) -> None:
        self._has_stepped = self._exchanged = self._was_dropped = False
        if self._logical.place == 0:
            self._stepped = 0
        if not self.steps:
            self._settings_digest = crc32(repr(self.settings_of()).encode())

    @property
    def is_scheduled(self) -> bool:
        """Whether a scheduler of torch has set the rates since the update began."""
        return self._logical.is_scheduled

    def _check_stepped(self) -> None:
        """Raises ConfigError where a loop goes on to its next batch and has not stepped on this one."""
        # An optimizer may rest for a whole round, in which its gradients are cleared.
        others = [one for one in self._everyone if isinstance(one, LogicalGradients) and one.has_stepped]
        if self.pending and others and not self.has_stepped:
            raise ConfigError(
                f"A loss on the batch of logical worker {self._logical.rank} has left gradients in the parameters of "
                f"optimizer {self._place + 1} (in the order of the calls of distributed_optimizer()), which did not "
                f"step; optimizer {others[0]._place + 1} did. Call zero_grad() of optimizer {self._place + 1} on each "
                "batch too, or let the loss train one model: loss.backward(inputs=list(net.parameters()))."
            )
        if self.pending or self._stepped not in (0, self._logical.place + 1):
            raise ConfigError(
                f"The loop asks for its next batch, and optimizer.step() was not called on that of logical worker "
                f"{self._logical.rank}. With 'reproducible' every batch is followed by step(), which updates at the "
                "last one of an update. To merge batches, set strategy.gradient_merge; to skip one, leave its "
                "backward() out."
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

    def _check_step(self) -> None:
        logical = self._logical
        if self.has_stepped:
            raise ConfigError(
                f"step() was called a second time on the batch of logical worker {logical.rank}. With 'reproducible' a "
                "batch has one step() of each optimizer."
            )
        if self._stepped != logical.place:
            raise ConfigError(
                f"step() was called on the batch of logical worker {logical.rank}, and {self._stepped} of this round's "
                f"batches were stepped on before it, where {logical.place} are due: call step() of an optimizer once "
                "on each batch of an update, or on none, before the loop takes the next batch (a prefetcher takes it "
                "too early)."
            )

    # ---- a backward pass ------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begins a backward pass."""
        if self._running:
            return
        self._check_turn("backward() was called")
        if any(isinstance(one, LogicalGradients) and one.has_stepped for one in self._everyone):
            raise ConfigError(
                f"backward() was called after step() on the batch of logical worker {self._logical.rank}. With "
                "'reproducible' parameters change at the last batch of an update, so this loss would see other "
                "parameters on some workers. Call every backward() of a batch before its first step() (of two "
                "optimizers, as in a GAN: loss.backward(inputs=list(net.parameters())) for each loss), or update each "
                "model in a loop of its own over fleet.elastic.logical_ranks()."
            )
        self._notes_pass()
        self._notice_clear()
        self._running = True
        torch.autograd.Variable._execution_engine.queue_callback(self._set_aside)
        self._unmark()
        self._was_dropped = False
        self._begin_update()
        for parameter in self._accumulators:
            parameter.grad = None
        self._sends = self.ends_round and self._is_alone
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

    @property
    def _is_alone(self) -> bool:
        return all(one is self or one.lost for one in self._everyone)

    def _begin_update(self) -> None:
        """In the first turn: plans the buckets, and keeps gradients that nobody has cleared."""
        if not self.steps and not self.pending:
            self._plan()
            self._old = {p: p.grad for p in self._accumulators if p.grad is not None and p is not self._zeros}

    def _plan(self) -> None:
        """Divides the parameters that train into buckets, unless they are the same as before."""
        trained = [p for p in self._parameters() if p.requires_grad]
        if self._hooks and [*map(id, trained)] == [*map(id, self._bucket_of)]:
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
        logical = self._logical
        return (logical.seed + logical.round + logical.order + self._settings_digest + 97 * self._place) % _AGREED

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
        elif self.ends_round:
            self._waits = True
            torch.autograd.Variable._execution_engine.queue_callback(self._exchange_waiting)
        if not self.is_last:
            self._mark()

    def _notice_clear(self) -> None:
        seen = [self._zeros] if self._zeros is not None else list(self.pending) if self._exchanged else []
        if seen and all(p.grad is None for p in seen):
            self._zeros = None
            self.clear()

    @torch.no_grad()
    def _exchange_waiting(self) -> None:
        """Ends a backward pass that may have reached several optimizers."""
        if self._waits:  # otherwise another one's callback was first
            self._exchange_together()

    def _exchange_together(self) -> bool:
        """Exchanges the gradients of each optimizer that has some on any worker; returns whether there was one."""
        live = [one for one in self._everyone if isinstance(one, LogicalGradients) and not one.lost]
        waiting = torch.tensor([float(one._waits) for one in live], device=self._device)
        if self._group is not None:
            wait_for(dist.all_reduce(waiting, dist.ReduceOp.MAX, group=self._group, async_op=True))
        found = [one for one, waits in zip(live, waiting.tolist(), strict=True) if waits]
        for one in found:
            one._exchange_from_first()
        return bool(found)

    def _exchange_from_first(self) -> None:
        self._begin_update()
        self._next = 0
        self._exchange()

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters())).device

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchanges the buckets that were not sent yet; ``.grad`` is the update's where the round completes one."""
        self._waits = False
        while self._next < len(self._buckets):
            self._send_next(self.pending.get)
        self._exchanged = True
        if not self._buckets:
            return  # nothing trains
        if not self.is_last:
            for bucket in self._buckets:
                bucket.reduce()
            return
        divisor = self._counts.divisor(self._divisor, self._device)
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
                "The workers exchange gradients of different updates, with different learning rates or seeds, or of "
                "ElasticSamplers of different seeds, lengths or epochs. With 'reproducible' every batch has its "
                "step(); all set the same rates, momenta and decays, by fleet.update_loss(loss) and not by losses of "
                "their own; and torch.manual_seed() after distributed_model() takes one seed: each logical worker "
                "draws its own numbers from it."
            )

    # ---- step() ---------------------------------------------------------------------------------------------------

    def exchange_missing(self) -> None:
        """Exchanges in the last turn of a round, where its batch had no backward pass; the other workers wait."""
        if not self._logical.is_open or self.has_stepped:
            return
        self._notice_clear()
        self._begin_update()
        while self.ends_round and not self._exchanged:
            if self._is_alone or not self._exchange_together():
                self._exchange_from_first()

    def end_batch(self) -> bool:
        """Ends a turn; returns whether it completes an update, and the gradients of all its batches are in ``.grad``.

        Raises ConfigError when the batch belongs to no turn, or a gradient was written that no update would see.
        """
        self._check_turn("step() was called")
        self._check_step()
        self.exchange_missing()
        if self._was_dropped:
            raise ConfigError(
                "The gradients of a batch were cleared between backward() and step(), when all workers had exchanged "
                "them. To leave a batch out, leave its backward() out."
            )
        ends_round = self.ends_round
        self._counts.note_batch()
        rank = self._logical.rank
        agreed = self._agreed()
        is_last = Accumulator.end_batch(self)
        self._running = self._sends = False
        self._has_stepped = True
        self._stepped += 1
        self._watch(self._frozen)
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
        if is_last:
            self._logical.draw_from(self._logical.seed, "update", self._logical.round)  # a rule that draws noise
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
        self._was_dropped = self._exchanged
        # Every logical worker clears the gradients of the update before, once.
        if not self.steps:
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
            self.settings_of = dict
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
