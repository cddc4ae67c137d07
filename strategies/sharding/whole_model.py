"""Stage 2: whole parameters on every worker; each owns rows of every gradient and of the optimizer's state.

``WholeModule`` exchanges the gradients, and ``RowsOptimizer`` updates this worker's rows, with state for them alone.

[Note: From backward to step]
In a pass that exchanges, a gradient is taken out of ``.grad`` when it has arrived, and its bucket is reduced when all
of it is there, in the reverse order of the parameters. When the pass ends, ``.grad`` is the shard: a DTensor, also for
a worker without rows. In other passes ``.grad`` is whole and local, as in data parallel; the next exchange takes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._gradients.passes import fills_gradients, passes_of
from fleet.strategies._gradients.reducer import overlapped_buckets
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, loss_of, step_hooks_around
from fleet.strategies._shared.parts import is_part, mark_rows, optimizer_state_like, part_like, rows_of
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.sharding.bucket_sizes import IN_FLIGHT, LAST_BYTES
from fleet.strategies.sharding.divided_model import Division
from fleet.strategies.sharding.exchanging_module import ExchangingModule
from fleet.strategies.sharding.part_rules import keep_part_rules
from fleet.strategies.sharding.row_owners import RowBucket, RowOwners
from fleet.strategies.sharding.unit_order import UnitOrder

ALIKE = "Call backward() and step() on every worker alike, even when one worker's batch is bad."
_SHOWN = 6  # names in a message


class WholeModule(ExchangingModule):
    """Runs a module whose gradients are divided; buffers are rank 0's before each training forward.

    A parameter belongs to the first model that it was wrapped in.

    Attributes:
        local: the parameters to whose gradients something was added after the last exchange.
        rows: the owners of rows.
    """

    def __init__(self, module: nn.Module, division: Division, order: UnitOrder, bucket_bytes: float) -> None:
        super().__init__(module, division.process_group)
        self.local: set[Tensor] = set()
        self.rows = RowOwners(division.mesh)
        self._division = division
        self._bucket_bytes = bucket_bytes
        self._divisor = division.divisor or division.process_group.size()
        # Workers may start with different values, and step() would join rows of all of them in one parameter.
        broadcast_from_rank_0([*module.parameters(), *module.buffers()], division.process_group)
        keep_part_rules(division.mesh, self._divisor, whole_parameters=True)
        self._order = order
        self._number = order.add()
        # For each parameter its dictionaries of hooks: the user's from before, and the present one, with ours first.
        self._hooks: dict[nn.Parameter, list[Any]] = {}
        self._handles: list[Any] = []
        for p in module.parameters():
            self._watch(p)
        self._plan: list[RowBucket] = []
        self._planned: list[nn.Parameter] = []
        self._next = 0
        # The state of a pass: parameters whose gradient has come, gradients that are not sent yet, buckets on the wire
        # and back, and the shards that earlier passes have exchanged.
        self._came: set[Tensor] = set()
        self._arrived: dict[Tensor, Tensor] = {}
        self._sent: list[tuple[RowBucket, Tensor, Any, Tensor | None]] = []
        self._received: list[tuple[RowBucket, Tensor]] = []
        self._kept: dict[Tensor, Any] = {}
        self._passes = passes_of(self)
        self._passes.starts.append(self._begin)
        self._passes.ends.append(self._end)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        self.share_buffers()
        return self.module(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Returns the copy of the module: gradients of a copy have no owners."""
        return memo[id(self.module)]

    def holds(self, parameter: Tensor) -> bool:
        """Returns whether the gradient of ``parameter`` is exchanged here."""
        return parameter in self._hooks

    def has_exchanged(self, parameter: Tensor) -> bool:
        """Returns whether ``parameter`` is exchanged here and nothing was added to its gradient since."""
        return parameter in self._hooks and parameter not in self.local

    def close(self) -> None:
        """Leaves the parameters with the hooks of the user alone."""
        # torch keeps one dictionary for a parameter, so hooks that were added since join the user's first one.
        for handle in self._handles:
            handle.remove()
        for p, known in self._hooks.items():
            own = known.pop()
            own.popitem(last=False)
            users: Any = [hooks for hooks in (*known, own) if hooks] or [None]
            p._post_accumulate_grad_hooks = users[0]
            for more in users[1:]:
                users[0].update(more)
            mark_rows(p, None)
        self._hooks.clear()

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def _watch(self, parameter: nn.Parameter) -> None:
        trains = parameter.requires_grad
        is_number = parameter.is_floating_point() or parameter.is_complex()
        if rows_of(parameter) is not parameter or not is_number:
            return
        if is_part(parameter.grad):
            parameter.grad = None  # a shard that an earlier job left
        users = parameter._post_accumulate_grad_hooks
        self._hooks[parameter] = [] if users is None else [users]
        # torch takes hooks of trained parameters only, and a frozen one may be unfrozen later.
        parameter.requires_grad_(True)
        self._handles.append(parameter.register_hook(partial(self._clear_way, parameter)))
        self._add_hook(parameter)
        parameter.requires_grad_(trains)
        self.rows.of(parameter)

    def _add_hook(self, parameter: nn.Parameter) -> None:
        hooks = OrderedDict([(-1, self._arrive)])
        parameter._post_accumulate_grad_hooks = hooks
        self._hooks[parameter].append(hooks)

    def _clear_way(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Sets a shard aside, to which autograd could not add a whole gradient."""
        if is_part(parameter.grad) and fills_gradients([parameter]):
            self._passes.begin()
            self._kept[parameter] = parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter) -> None:
        self._passes.begin()
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad:
            return  # frozen after forward
        if not self.exchanges:
            self.local.add(parameter)
            if parameter in self._kept:
                # The next exchange sums and divides. So each owner of these rows brings along the shard times the
                # divisor over the number of owners, and the sum gives the shard back.
                share = torch.zeros_like(gradient)
                copies = 1 if self.rows.copies is None else self.rows.copies.size()
                self.rows.own(share).copy_(self._kept.pop(parameter).to_local()).mul_(self._divisor / copies)
                parameter.grad = gradient + share
            self._run_hooks(parameter)
            return
        if parameter in self._came:
            raise ConfigError(
                f"The gradient of {self._named([parameter])} came twice in one backward pass, and the first is being "
                "exchanged. A part of the model that runs more than once in a forward cannot be recomputed with "
                "use_reentrant=True in sharding stage 2: pass use_reentrant=False to checkpoint()."
            )
        parameter.grad = None
        self._came.add(parameter)
        self._arrived[parameter] = gradient.detach()
        # Only in the order of the plan, though a later bucket may be full first: workers must send alike.
        while self._next < len(self._plan) and all(
            p in self._arrived for p in reversed(self._plan[self._next].parameters)
        ):
            self._send()

    # ---- a pass -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begins a pass, without what a failed one may have left."""
        lists: tuple[Any, ...] = (self._came, self._arrived, self._sent, self._received, self._kept)
        for left in lists:
            left.clear()
        self._next = 0
        for p, known in self._hooks.items():
            # Hooks that the user has added stand in our dictionary, and would see whole local gradients. Ours moves to
            # a new one; theirs run after the exchange.
            if len(known[-1]) > 1:
                del known[-1][-1]
                self._add_hook(p)
        trained = [p for p in reversed(self._hooks) if p.requires_grad]
        if list(map(id, trained)) != list(map(id, self._planned)):
            self._planned = trained
            buckets = overlapped_buckets(trained, self._bucket_bytes, LAST_BYTES) if trained else []
            self._plan = [RowBucket(bucket, self.rows.degree, 2 * len(bucket)) for bucket in buckets]

    def _send(self) -> None:
        """Starts the exchange of the next bucket; its header counts the workers with and without each gradient."""
        bucket = self._plan[self._next]
        # One meeting serves the whole pass: its other buckets follow in the same order on every worker.
        if self._next == 0:
            self._order.check((self._number,), lambda: "exchanging the gradients of the model", ALIKE)
        if len(self._sent) == IN_FLIGHT:
            self._receive()
        buffer = bucket.new_buffer()
        flags: list[bool] = []
        for place, p in enumerate(bucket.parameters):
            gradient = self._arrived.pop(p, None)
            flags += [gradient is not None, gradient is None]
            if gradient is not None:
                bucket.put(buffer, place, gradient)
        if not self._division.sum_first:
            buffer.div_(self._divisor)  # before the sum, which overflows first in 16 bit
        # Every line gets the header, because a worker receives the sum of one line alone.
        buffer[:, bucket.size :] = torch.tensor(flags, dtype=buffer.dtype).to(buffer.device)
        work, line = self.rows.reduce(buffer, self._next)
        self._next += 1
        self._sent.append((bucket, buffer, work, line))

    def _receive(self) -> None:
        bucket, buffer, work, line = self._sent.pop(0)
        wait_for(work)
        # The line is cloned, so that the buffer with the lines of all workers can be freed.
        line = buffer[self.rows.rank].clone() if line is None else line
        # The copies of the model follow, so that only this worker's rows cross the wire a second time.
        if self.rows.copies is not None:
            dist.all_reduce(line, group=self.rows.copies)
        self._received.append((bucket, line))

    @torch.no_grad()
    def _end(self) -> None:
        """Ends a pass: all workers send all buckets, and read the headers afterwards."""
        if not self.exchanges:
            return
        while self._next < len(self._plan):
            # Gradients that only earlier passes, which did not exchange, have reached go along.
            for p in self._plan[self._next].parameters:
                if p not in self._came and p.grad is not None and not is_part(p.grad):
                    self._arrived[p] = p.grad
                    p.grad = None
            self._send()
        while self._sent:
            self._receive()
        exchanged = self._put_shards()
        self.local.difference_update(self._hooks)
        for p in exchanged:
            self._run_hooks(p)

    def _run_hooks(self, parameter: nn.Parameter) -> None:
        for hooks in self._hooks[parameter][:-1]:
            for hook in list(hooks.values()):
                hook(parameter)

    def _put_shards(self) -> list[nn.Parameter]:
        """Puts this worker's rows of the exchanged gradients into ``.grad``; returns the parameters with a gradient.

        Raises ConfigError where workers have brought gradients of different parameters and the options forbid it.
        """
        found: list[tuple[nn.Parameter, Any]] = []
        of_some: list[nn.Parameter] = []
        for bucket, line in self._received:
            # Summed like the gradients: numbers above 0 mean that a worker has one, that a worker has none.
            flags = line[bucket.size :].real.tolist()
            if self._division.sum_first:
                line.div_(self._divisor)
            for place, p in enumerate(bucket.parameters):
                is_used, is_missing = flags[2 * place : 2 * place + 2]
                if is_used and is_missing and not self._division.find_unused:
                    of_some.append(p)
                elif is_used:
                    found.append((p, self.rows.shard(bucket.rows(line, place, self.rows.own(p)), p)))
        self._received.clear()
        if of_some:
            raise ConfigError(
                f"sharding stage 2: some workers have gradients of {self._named(of_some)} in this pass, and others "
                "none; nothing was updated. Every worker must use the same parameters in a batch. Where they do not, "
                "set strategy.find_unused_parameters = True, with which each may take another branch of the model, or "
                "let every parameter take part on every worker."
            )
        # No bucket was refused, and all workers have read the same headers: none is left with half of its shards.
        for p, gradient in found:
            kept = self._kept.pop(p, p.grad)
            p.grad = gradient if kept is None else kept.add_(gradient)
        return [p for p, _ in found]

    def _named(self, parameters: Sequence[Tensor]) -> str:
        chosen = set(parameters)
        names = [name for name, p in self.module.named_parameters() if p in chosen]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return f"{', '.join(names[:_SHOWN])}{more}"


class RowsOptimizer(OptimizerWrapper):
    """Lets the optimizer inside update this worker's rows, then receives the others.

    Args:
        optimizer: the optimizer inside, whose groups hold whole parameters except during its step.
        divided: the models, also those that come later.
        order: makes sure that all workers step.
        bucket_bytes: bytes of parameters that travel at once.
        offload: keep the state in host memory between steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        divided: Sequence[WholeModule],
        order: UnitOrder,
        bucket_bytes: float,
        offload: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._divided = divided
        self._order = order
        self._number = order.add()
        self._bucket_bytes = bucket_bytes
        self._offload = offload
        self.divide_state()

    def divide_state(self) -> None:
        """Cuts state from before the model was wrapped."""
        for p, entry in self.state.items():
            for key, value in entry.items() if isinstance(p, Tensor) else ():
                if isinstance(value, Tensor) and value.shape == p.shape:
                    entry[key] = part_like(value, self._rows(p))

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Updates this worker's rows and receives the others; returns the closure's loss."""
        loss = loss_of(closure)
        with step_hooks_around(self.optimizer):
            stepped = [p for p in self.parameters() if p.grad is not None]
            with self._rows_in_groups(stepped):
                super().step()
            # A worker that skips step() (a bad batch) would leave the others inside the gather without a word.
            if any(one.holds(p) for one in self._divided for p in stepped):
                self._order.check((self._number,), lambda: "step(), which exchanges the updated parameters", ALIKE)
            for one in self._divided:
                one.rows.gather([p for p in stepped if one.holds(p)], self._bucket_bytes)
        return loss

    @contextmanager
    def _rows_in_groups(self, stepped: Sequence[Tensor]) -> Iterator[None]:
        """Puts the rows of ``stepped`` with their gradients and state into the optimizer inside, until the end."""
        # Outside step() the groups hold the whole parameters, which are those of the model.
        groups = [list(group["params"]) for group in self.param_groups]
        pairs = [(p, rows) for p in stepped if (rows := self._rows(p)) is not p]
        for p, rows in pairs:
            gradient: Any = part_like(p.grad, rows)  # a script may have put a whole one there
            rows.grad = gradient.redistribute(placements=rows.placements)
            if p in self.state:
                self.state[rows] = self._placed(self.state.pop(p), rows.device)
        rows_of_whole = dict(pairs)
        for group in self.param_groups:
            group["params"][:] = [rows_of_whole.get(p, p) for p in group["params"]]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"][:] = params
            for p, rows in pairs:
                rows.grad = None
                if rows in self.state:
                    self.state[p] = self._placed(self.state.pop(rows), torch.device("cpu"))

    def _rows(self, parameter: Any) -> Any:
        return next((one.rows.of(parameter) for one in self._divided if one.holds(parameter)), parameter)

    def _placed(self, entry: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Returns the state ``entry``; with offload on ``device``."""
        if not self._offload:
            return entry
        return {
            key: value.to(device) if isinstance(value, Tensor) and value.dim() else value
            for key, value in entry.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state: with DTensors, whole, or the part that this worker saved.

        Raises CheckpointError for the part of another worker.
        """
        rows = [self._rows(p) for p in self.parameters()]
        if any(map(is_part, rows)):
            state_dict = optimizer_state_like(state_dict, rows)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_divided": (), "_order": None}
