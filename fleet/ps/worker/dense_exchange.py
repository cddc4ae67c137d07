"""DenseExchange: the dense half of hybrid training. Trainers average gradients and step their own optimizers alike.

[Note: One buffer]
A step is one all-reduce of one float32 buffer: all gradients, which parameter has one, who takes a step, and worker
0's learning rates. A parameter for which no trainer has a gradient gets none, as in a single process. A trainer
without batches adds zeros and steps with the mean of the others, so parameters and optimizer states stay bitwise equal.

A rate is sent as three float32 numbers whose float64 sum is exactly the rate: workers step with worker 0's rate,
whatever their own schedules say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.errors import NanInfError, PSError
from fleet.ps.worker.dense_part import DensePart

_RATE_PARTS = 3


@dataclass(frozen=True)
class Round:
    """The counts of one exchange: trainers that took a step, had a bad gradient, or want to leave."""

    active: int
    bad: int
    leaving: int


class DenseExchange:
    """The dense parameters of one trainer.

    Args:
        parts: the dense tables of the plan, whose parameters are exchanged.
        optimizer: the user's; loading a state replaces its groups, so they are read at each use.
        trainers: all trainers.
    """

    def __init__(
        self,
        parts: list[DensePart],
        optimizer: Optimizer,
        trainers: TrainerGroup,
    ) -> None:
        self._parameters: list[nn.Parameter] = [p for part in parts for p in part.parameters]
        self._optimizer = optimizer
        self._trainers = trainers
        self._size = sum(p.numel() for p in self._parameters)
        length = self._size + len(self._parameters) + 3 + _RATE_PARTS * len(self._groups)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._buffer = torch.zeros(length, device=device)
        self._wait: Callable[[], None] = lambda: None
        self.rounds = 0  # updates so far, the same number on every trainer
        self.is_stepping = False

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    # -- a step --------------------------------------------------------------------------------------------------

    def start(self, *, bad: bool = False) -> None:
        """Starts the exchange of the gradients that backward left."""
        self._fill(active=True, bad=bad, leaving=False)
        self._wait = self._trainers.start_sum(self._buffer)

    def finish(self) -> Round:
        """Waits for the gradients of every trainer; the parameters then have their mean."""
        self._wait()
        found = self._found()
        if not found.bad:
            self._take(found.active)
        return found

    def step(self) -> None:
        """Steps the optimizer with worker 0's learning rates."""
        sent = self._header()[3:].reshape(-1, _RATE_PARTS).astype(np.float64).sum(axis=1).tolist()
        own = [group["lr"] for group in self._groups]
        self.is_stepping = True
        try:
            for group, rate in zip(self._groups, sent, strict=True):
                _set_rate(group, rate)
            self._optimizer.step()
            self.rounds += 1
        finally:
            self.is_stepping = False
            for group, rate in zip(self._groups, own, strict=True):
                group["lr"] = rate

    # -- in steps of the others ----------------------------------------------------------------------------------

    def stand_by(self, *, leaving: bool) -> int:
        """Takes part in the others' steps until none takes one, or with ``leaving`` until all leave.

        Returns how many trainers are leaving. Gradients of this trainer stay as they are.

        Raises:
            NanInfError: another trainer had a gradient that is not finite.
        """
        kept = [p.grad for p in self._parameters]
        try:
            while True:
                for parameter in self._parameters:
                    parameter.grad = None
                self._fill(active=False, bad=False, leaving=leaving)
                self._trainers.start_sum(self._buffer)()
                found = self._found()
                if found.bad:
                    raise not_finite(self._trainers.rank, found.bad)
                if found.active:
                    self._take(found.active)
                    self.step()
                elif not leaving or found.leaving == self._trainers.size:
                    return found.leaving
        finally:
            for parameter, gradient in zip(self._parameters, kept, strict=True):
                parameter.grad = gradient

    @torch.no_grad()
    def copy_from_0(self, tensors: list[Tensor]) -> None:
        """Gives ``tensors`` the values they have at trainer 0."""
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            self._trainers.copy_from_0(whole)
            tensor.copy_(whole)

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Returns the ``numbers`` of every trainer, by rank; integers below 2**52."""
        table = torch.zeros((self._trainers.size, len(numbers)), dtype=torch.float64, device=self._buffer.device)
        table[self._trainers.rank] = torch.tensor(numbers, dtype=torch.float64)
        self._trainers.start_sum(table)()
        return [[int(number) for number in row] for row in table.tolist()]

    def share(self, data: bytes) -> bytes:
        """Returns trainer 0's ``data`` on every trainer."""
        (size, *_) = self.gather([len(data)])[0]
        mine = torch.zeros(size, dtype=torch.uint8, device=self._buffer.device)
        if size and self._trainers.rank == 0:
            mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._buffer.device)
        if size:
            self._trainers.copy_from_0(mine)
        return mine.cpu().numpy().tobytes()

    # -- inside --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _fill(self, *, active: bool, bad: bool, leaving: bool) -> None:
        buffer = self._buffer
        start = 0
        flags = []
        buffer.zero_()
        for parameter in self._parameters:
            gradient = parameter.grad if active else None
            flags.append(float(gradient is not None))
            if gradient is not None:
                dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
                buffer[start : start + parameter.numel()].view(parameter.shape).copy_(dense)
            start += parameter.numel()
        rates = [
            _split(float(group["lr"])) if self._trainers.rank == 0 else [0.0] * _RATE_PARTS for group in self._groups
        ]
        tail = [*flags, float(active), float(bad), float(leaving), *(part for parts in rates for part in parts)]
        buffer[start:] = torch.tensor(tail, dtype=torch.float32)

    def _header(self) -> np.ndarray:
        header: np.ndarray = self._buffer[self._size + len(self._parameters) :].cpu().numpy()
        return header

    def _found(self) -> Round:
        active, bad, leaving = (int(number) for number in self._header()[:3])
        return Round(active, bad, leaving)

    @torch.no_grad()
    def _take(self, active: int) -> None:
        flags = self._buffer[self._size : self._size + len(self._parameters)].tolist()
        start = 0
        self._buffer[: self._size].div_(active)
        for parameter, count in zip(self._parameters, flags, strict=True):
            mean = self._buffer[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            if not count:
                continue
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                parameter.grad = mean.clone()
            else:
                parameter.grad.copy_(mean)


def not_finite(rank: int, count: int) -> NanInfError:
    """Returns the error for a trainer whose peers found gradients that are not finite."""
    return NanInfError(
        f"FLAGS_check_nan_inf: {count} other trainer(s) have a gradient that is not finite; their logs name it. "
        "Nothing was updated.",
        rank=rank,
        step=0,
    )


def check_same_round(rounds: list[int]) -> None:
    """Checks that all trainers continue after the same number of updates; ``rounds`` has it by rank.

    Raises:
        PSError: checkpoints of different steps; the trainers would wait for each other forever.

    Example:
        >>> check_same_round([4, 4])
    """
    if len(set(rounds)) > 1:
        raise PSError(
            f"hybrid training: the trainers continue after {rounds} updates (by rank), but take each update together. "
            "Load checkpoints of the same step on all of them, or on none."
        )


def _split(rate: float) -> list[float]:
    parts = []
    for _ in range(_RATE_PARTS):
        part = float(np.float32(rate))
        parts.append(part)
        rate -= part
    return parts


def _set_rate(group: dict[str, Any], rate: float) -> None:
    own = group["lr"]
    group["lr"] = torch.full_like(own, rate) if isinstance(own, Tensor) else rate


# All trainers of the job; each makes the same calls in the same order.
TrainerGroup: TypeAlias = "SingleTrainer | ProcessGroupTrainers"


class SingleTrainer:
    """The only trainer of a job.

    Example:
        >>> SingleTrainer().start_sum(torch.ones(2))()
    """

    rank = 0
    size = 1

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Does nothing: ``tensor`` is the sum over all trainers already."""
        return lambda: None

    def copy_from_0(self, tensor: Tensor) -> None:
        """Does nothing."""


class ProcessGroupTrainers:
    """The trainers as a process group of torch: gloo for tensors on the host, NCCL for those on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Starts to replace ``tensor`` with its sum over all trainers; call the result to wait for it.

        The wait raises PSError when a trainer is gone.
        """
        work: Any = self._tried(lambda: dist.all_reduce(tensor, group=self._group, async_op=True))

        def wait() -> None:
            self._tried(work.wait)

        return wait

    def copy_from_0(self, tensor: Tensor) -> None:
        """Replaces ``tensor`` with trainer 0's; raises PSError when a trainer is gone."""
        source = dist.get_global_rank(self._group, 0)
        self._tried(lambda: dist.broadcast(tensor, src=source, group=self._group))

    def _tried(self, act: Callable[[], object]) -> object:
        try:
            return act()
        except (RuntimeError, torch.distributed.DistError) as error:
            raise PSError(
                f"hybrid training, trainer {self.rank} of {self.size}: the exchange of dense gradients failed: a "
                "trainer is gone or silent. Look at the logs of the others. An all-reduce needs every trainer: restart "
                "all of them from checkpoints of the same step; the servers keep their tables."
            ) from error
