"""ValueMeans: numbers of one worker, and their means over the workers in one exchange.

[Note: One exchange]
Every worker sends one vector: a header, then its values in the order of their sorted names, all times its weight. The
header holds the weight, and two digests of names and step with their squares. The sums of digests show on every
worker alike whether all sent the same (n * sum(d * d) == sum(d) ** 2 only then), so the error names the values of each
worker and no other message is needed. All vectors have one length; values beyond it follow in a second message. The
first call goes through the roll call, which finds a worker that does not log. Later calls use a separate process
group, so that a call that one worker leaves out cannot be confused with an exchange of gradients.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.env import Environment
from fleet.errors import ConfigError
from fleet.job.job import Job
from fleet.job.whereabouts import named
from fleet.strategies._shared.exchanged_texts import gather_texts
from fleet.trackers.logical_values import LogicalValues

__all__ = ["ValueMeans", "as_numbers"]

_HEADER = 5
_LENGTH = 64
_CALL = "fleet.log()"


class ValueMeans:
    """Computes means over the workers of ``job``; see [Note: One exchange]."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group: dist.ProcessGroup | None = None
        self._of_turns = LogicalValues(job, self._group_of)

    def of(self, values: dict[str, float], step: int, call: str = _CALL) -> dict[str, float] | None:
        """Returns the mean of each value over the workers; every worker must call it.

        In a turn of a reproducible job it is the mean over the logical workers, and ``None`` before the last turn.

        In a parameter-server job, whose workers do not step together, the values are returned as they are. Of the
        workers that hold one copy of the model together, one represents the copy, see ``UtilBase.reduce_replicas``.

        Raises:
            ConfigError: the workers' names or steps differ.
            RendezvousError: a worker does not call it.
        """
        job = self._job
        if job.logical is not None and job.logical.is_open:
            return self._of_turns.of(call, values, step)
        if job.world_size == 1 or not job.collective:
            return values
        self._group_of(_CALL)
        names = sorted(values)
        weight = 1.0 if job.util.stands_for_replica else 0.0
        own = [values[name] if weight else 0.0 for name in names]
        digest = crc32(json.dumps([names, step]).encode())
        # Two halves, because squares of 32-bit numbers summed over workers would not be exact in float64.
        high = digest >> 16
        low = digest & 0xFFFF
        room = _LENGTH - _HEADER
        with job.explaining():
            sums = self._sum([weight, high, high * high, low, low * low, *own[:room]], _LENGTH)
            if not self._all_equal(sums):
                self._refuse(names, step)
            total = sums[_HEADER:]
            if len(own) > room:
                total += self._sum(own[room:], len(own) - room)
        return {name: value / sums[0] for name, value in zip(names, total, strict=False)}

    def close(self) -> None:
        """Releases the group."""
        self._group = None

    def _group_of(self, call: str) -> dist.ProcessGroup:
        """Returns the group of the workers for values; the first time, where all have made ``call``."""
        if self._group is None:
            self._job.meet(call)
            timeout = timedelta(milliseconds=Environment().float("PADDLE_PG_TIMEOUT"))
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        return self._group

    def _sum(self, own: list[float], length: int) -> list[float]:
        vector = torch.zeros(length, dtype=torch.float64)
        vector[: len(own)] = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(vector, group=self._group)
        found: list[float] = vector.tolist()
        return found

    def _all_equal(self, sums: list[float]) -> bool:
        _, high, high_squares, low, low_squares = (int(value) for value in sums[:_HEADER])
        size = self._job.world_size
        return size * high_squares == high * high and size * low_squares == low * low

    def _refuse(self, names: list[str], step: int) -> None:
        assert self._group is not None
        said = gather_texts(json.dumps([names, step]), self._group, torch.device("cpu"))
        places: dict[str, list[int]] = {}
        for rank, text in enumerate(said):
            places.setdefault(text, []).append(rank)
        lines = []
        for text, ranks in places.items():
            found, at = json.loads(text)
            lines.append(f"  {named(ranks, lambda rank: '')}: step {at}, values {found}")
        raise ConfigError(
            f"[rank {self._job.global_rank} of {self._job.world_size}] {_CALL}: the workers log different "
            "values where all must log the same names at the same step:\n" + "\n".join(lines) + "\nCall it on every "
            "worker with the same names after the same step, and not inside `if fleet.is_first_worker():`; worker 0 "
            "writes the means."
        )


def as_numbers(values: Any, call: str = _CALL) -> dict[str, float]:
    """Returns ``values`` as floats; tensors of one device are fetched together.

    Raises:
        ConfigError: ``values`` is no dictionary of names and numbers.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f'{call} takes a dictionary of names and numbers, as in {{"loss": loss}}; got {values!r:.80}.'
        )
    found: dict[str, float] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{call}: a name is {name!r:.80}; it takes names that are texts, and not empty.")
        if isinstance(value, Tensor):
            tensors[name] = _scalar(name, value, call)
        elif isinstance(value, numbers.Real) or (getattr(value, "shape", None) == () and hasattr(value, "item")):
            found[name] = _float(name, value, call)
        else:
            hint = f" Log its parts as '{name}/...'." if isinstance(value, Mapping) else ""
            raise ConfigError(f"{call}: {name!r} is {value!r:.80}; it takes a number or a tensor of one.{hint}")
    by_device: dict[torch.device, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            found[name] = float(tensor.item())
            continue
        by_device.setdefault(tensor.device, []).append(name)
    for names in by_device.values():
        # One copy from the device, since each copy waits for it.
        fetched = torch.stack([tensors[name].to(torch.float64) for name in names]).tolist()
        found.update(zip(names, fetched, strict=True))
    return {name: found[name] for name in values}


def _float(name: str, value: Any, call: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{call}: {name!r} is {value!r:.80}; it takes a number.") from None


def _scalar(name: str, value: Tensor, call: str) -> Tensor:
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if value.numel() != 1 or value.is_complex():
        raise ConfigError(
            f"{call}: {name!r} is a tensor of shape {tuple(value.shape)} and {value.dtype}; it takes one real number. "
            "Log its mean()."
        )
    return value.reshape(())
