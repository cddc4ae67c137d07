"""Stage 2: whole parameters on every worker; each owns rows of every gradient and of the optimizer's state.

``WholeModule`` exchanges the gradients, and ``RowsOptimizer`` updates this worker's rows, with state for them alone.

[Note: From backward to step]
In a pass that exchanges, a gradient is taken out of ``.grad`` when it has arrived, and its bucket is reduced when all
of it is there, in the reverse order of the parameters. When the pass ends, ``.grad`` is the shard: a DTensor, also for
a worker without rows. In other passes ``.grad`` is whole and local, as in data parallel; the next exchange takes it.

[Note: Rows]
Worker r of N owns the r-th of N chunks of dimension 0, as in stage 3. So exchanged gradients and the optimizer's state
are the same DTensors as there, and norms, clipping, states and checkpoints know one form. The owner of a row does not
depend on the parameters that travel in one bucket.
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from fleet.errors import ConfigError
from fleet.strategies._gradients.exchange_names import named_exchange
from fleet.strategies._gradients.flat import broadcast_from_rank_0, chunks, gather_into, sum_scatter_into
from fleet.strategies._gradients.passes import fills_gradients, passes_of
from fleet.strategies._gradients.reducer import overlapped_buckets
from fleet.strategies._shared.optimizer_wrapper import OptimizerWrapper, loss_of, step_hooks_around
from fleet.strategies._shared.parts import (
    chunk_of,
    is_part,
    mark_gathered,
    mark_rows,
    optimizer_state_like,
    part_like,
    rows_of,
)
from fleet.strategies._shared.waiting import wait_for
from fleet.strategies.sharding.bucket_sizes import GATHERED_BYTES, IN_FLIGHT, LAST_BYTES
from fleet.strategies.sharding.divided_model import Division
from fleet.strategies.sharding.exchanging_module import ExchangingModule
from fleet.strategies.sharding.part_rules import keep_part_rules
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
            # redistribute() costs Python also where nothing is to be done, which is nearly always.
            if gradient.placements != rows.placements:
                gradient = gradient.redistribute(placements=rows.placements)
            rows.grad = gradient
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


class RowBucket:
    """Parameters side by side in a buffer with a line for each worker, which holds the rows that it owns.

    Args:
        parameters: of one type, on one device.
        degree: number of workers.
        header_size: numbers at the end of each line that are no rows.
    """

    def __init__(self, parameters: Sequence[Any], degree: int, header_size: int = 0) -> None:
        self.parameters = list(parameters)
        self.size = 0  # of the rows in a line
        self._degree = degree
        self._columns: list[tuple[int, int]] = []
        for p in self.parameters:
            # Shard(0) rounds up: the first owners have full chunks, the last ones fewer rows or none.
            width = -(-p.shape[0] // degree) * (p.numel() // p.shape[0]) if p.numel() else 0
            self._columns.append((self.size, width))
            self.size += width
        self._length = self.size + header_size

    def new_buffer(self) -> Tensor:
        """Returns a buffer of zeros."""
        made: Tensor = self.parameters[0].detach().new_zeros(self._degree, self._length)
        return made

    def put(self, buffer: Tensor, place: int, whole: Tensor) -> None:
        """Copies ``whole``, of the shape of parameter ``place``, into ``buffer``."""
        for lines, values in self._pieces(buffer, place, whole.reshape(-1)):
            lines.copy_(values)

    def take(self, buffer: Tensor, place: int, whole: Tensor) -> None:
        """Copies parameter ``place`` from ``buffer`` into ``whole``."""
        flat = whole.reshape(-1)
        for lines, values in self._pieces(buffer, place, flat):
            values.copy_(lines)
        # reshape() may have copied, so the values still have to reach the parameter.
        if not whole.is_contiguous():
            whole.copy_(flat.view(whole.shape))

    def rows(self, line: Tensor, place: int, own: Tensor) -> Tensor:
        """Returns the view of ``line`` for the rows of parameter ``place``, in the shape of ``own``."""
        begin = self._columns[place][0]
        return line[begin : begin + own.numel()].view(own.shape)

    def _pieces(self, buffer: Tensor, place: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields views of ``buffer`` and of the flat ``values`` of a parameter for the same rows."""
        # The rows fill the lines of the first owners; the next line is filled in part, and later ones stay zero.
        begin, width = self._columns[place]
        if not width:
            return
        full = values.numel() // width
        yield buffer[:full, begin : begin + width], values[: full * width].view(full, width)
        rest = values[full * width :]
        if rest.numel():
            yield buffer[full, begin : begin + rest.numel()], rest


class RowOwners:
    """The rows that each worker of ``mesh`` owns; with two dims, the first holds copies of the second.

    Attributes:
        group: the workers that share one copy; ``degree`` is their number, ``rank`` this one's place.
        copies: the workers that own the same rows, or ``None``.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group(mesh.ndim - 1)
        self.copies = mesh.get_group(0) if mesh.ndim > 1 else None
        self.rank = self.group.rank()
        self.degree = self.group.size()
        self._mesh = mesh

    def own(self, whole: Tensor) -> Tensor:
        """Returns this worker's rows of ``whole``, in its memory."""
        return whole.detach()[chunk_of(whole.shape[0], self.rank, self.degree)]

    def of(self, parameter: nn.Parameter) -> Any:
        """Returns this worker's rows of ``parameter`` as a DTensor, in the memory that the parameter has now."""
        known = rows_of(parameter)
        own = self.own(parameter)
        # A conversion such as model.half() moves the parameter, and its rows with it.
        if known is parameter or known.to_local().data_ptr() != own.data_ptr():
            known = nn.Parameter(self.shard(own, parameter), parameter.requires_grad)
            known.__dict__.update({name: v for name, v in vars(parameter).items() if name != "fleet_rows"})
            mark_gathered(known, parameter)  # part_of(known) is the parameter
            mark_rows(parameter, known)
        return known

    def shard(self, own: Tensor, whole: Tensor) -> DTensor:
        """Returns a DTensor of the shape of ``whole`` whose rows on this worker are ``own``."""
        placements = [*[Replicate()] * (self._mesh.ndim - 1), Shard(0)]
        like = torch.empty(whole.shape, device="meta") if own.is_contiguous() else whole
        return DTensor.from_local(own, self._mesh, placements, run_check=False, shape=whole.shape, stride=like.stride())

    def reduce(self, buffer: Tensor, number: int) -> tuple[Any, Tensor | None]:
        """Starts to sum ``buffer`` over the workers; returns the work, and this worker's line unless it is there."""
        with named_exchange("sharding", buffer, f"gradients, bucket {number}"):
            # gloo's reduce-scatter copies the buffer and sums the copy, so the sum in place is cheaper.
            if _is_gloo(self.group, buffer):
                return dist.all_reduce(buffer, group=self.group, async_op=True), None
            line = torch.empty_like(buffer[0])
            return sum_scatter_into(line, buffer.view(-1), group=self.group, async_op=True), line

    def _gather(self, buffer: Tensor) -> list[Any]:
        """Starts to fill every line of ``buffer`` from its worker; returns the works."""
        if not _is_gloo(self.group, buffer):
            return [gather_into(buffer.view(-1), buffer[self.rank], group=self.group, async_op=True)]
        # gloo gathers through two copies, which it keeps until its next exchange.
        ranks = dist.get_process_group_ranks(self.group)
        lines = zip(buffer, ranks, strict=True)
        return [dist.broadcast(line, rank, group=self.group, async_op=True) for line, rank in lines]

    @torch.no_grad()
    def gather(self, parameters: Sequence[nn.Parameter], bucket_bytes: float) -> None:
        """Gives every worker all rows of ``parameters`` as their owners have them."""
        sent: list[tuple[RowBucket, Tensor, list[Any]]] = []

        def finish() -> None:
            bucket, buffer, works = sent.pop(0)
            for work in works:
                wait_for(work)
            for place, p in enumerate(bucket.parameters):
                bucket.take(buffer, place, p.detach())

        for number, chunk in enumerate(chunks(parameters, min(bucket_bytes, GATHERED_BYTES))):
            # Each bucket in flight has a buffer, so their number bounds the memory.
            if len(sent) == IN_FLIGHT:
                finish()
            bucket = RowBucket(chunk, self.degree)
            buffer = bucket.new_buffer()
            for place, p in enumerate(chunk):
                own = self.own(p)
                bucket.rows(buffer[self.rank], place, own).copy_(own)
            with named_exchange("sharding", buffer, f"parameters, bucket {number}"):
                sent.append((bucket, buffer, self._gather(buffer)))
        while sent:
            finish()


def _is_gloo(group: Any, tensor: Tensor) -> bool:
    return bool(group._get_backend(tensor.device).name() == "gloo")
