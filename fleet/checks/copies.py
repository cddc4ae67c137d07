"""Copies: parameters, settings and states that workers hold as copies stay equal while a job trains.

See fleet/checks/README.md.
"""

from __future__ import annotations

import functools
import json
import platform
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet.checks.comparison import checksums, digest, first_difference, listed_ranks, ranks_by, weights_on
from fleet.checks.watched import OptimizerWatch, Watched
from fleet.errors import ConfigError, OptionWarning
from fleet.job.axes import COPY_AXES
from fleet.job.listener import Listener
from fleet.job.wrapped_model import WrappedModel
from fleet.strategies._shared.experts import is_expert
from fleet.strategies._shared.parameter_layout import layouts_of
from fleet.strategies._shared.parts import is_part

_FIRST = 3  # updates that are compared from the start
_TOLERANCE = 1e-3  # of the norm of all parameters, between unlike devices
_SKETCH = 8  # numbers that tell how far parameters are apart
_ADVICE = (
    "Change parameters, settings and states on every worker alike: not inside `if fleet.is_first_worker():`, not from "
    "a worker's own data or loss. Step on every worker. strategy.check_every sets how often the workers compare."
)


@dataclass
class Posted:
    """A digest that this worker has posted and not yet compared.

    Attributes:
        update: the update after which it was made.
        exchanges: the number of exchanges until then.
        names: the names of its sums; ``along_mp``: those that the workers along mp hold alike.
    """

    update: int
    exchanges: int
    names: list[str]
    along_mp: list[str]


class Copies(Listener):
    """Posts a digest of the copies of ``watched`` after some updates, and compares it after the next exchange.

    No worker waits: every worker posts before it takes part in the next exchange, so all have when that has ended.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._job = watched.job
        self._updates = 0
        self._due = 1  # the update after which the next digest is made
        self._equal_after = 0  # the last update after which all copies were equal
        self._only_counts = False
        self._posted: Posted | None = None
        self._old: list[int] = []  # updates whose posts are in the store
        self._has_warned = False
        self._unlike = ""  # the difference between the devices of the workers, in words
        self._buffers: dict[WrappedModel, dict[str, str]] = {}  # the buffers that all workers have

    def model_wrapped(self, model: WrappedModel) -> None:
        """Notes the buffers that every worker has."""
        self._buffers[model] = _layout(model)

    def structure_changed(self, model: WrappedModel, added: Mapping[str, nn.Parameter]) -> None:
        """Compares after the next update."""
        self._due = min(self._due, self._updates + 1)

    def state_loaded(self, target: WrappedModel | Optimizer) -> None:
        """Compares after the next update."""
        self._due = min(self._due, self._updates + 1)

    def before_join(self) -> None:
        """Compares no more: workers make different numbers of updates from now on."""
        self._posted = None
        self._job.listeners.put_to_sleep(self)

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Raises ConfigError where the copies differed after an earlier update."""
        watch = self._watched.stepped(optimizer)
        self._only_counts = watch is None or watch.optimizer.only_counts()
        if self._posted is None or self._watched.trains_locally:
            return
        exchanges = self._exchanges()
        if exchanges == 0 or exchanges != self._posted.exchanges:  # a pipeline's are over before its step, uncounted
            self._compare(self._posted)

    def after_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        """Posts a digest where one is due; where workers train alone, after an average."""
        watched = self._watched
        if self._only_counts or not (watched.compares and watched.models):
            return
        self._updates += 1
        if watched.trains_locally:
            if any(stepped.is_out_of_step for stepped in self._job.optimizers):
                return
            # Every worker has taken part in the average that has just ended, and had posted before it.
            if self._posted is not None:
                self._compare(self._posted)
        # The first updates one by one, later at multiples of ``every``: all workers post after the same updates.
        every = self._job.options["check_every"]
        if every and self._posted is None and self._updates >= self._due:
            self._due = self._updates + 1 if self._updates < _FIRST else (self._updates // every + 1) * every
            self._post()

    def before_save(self) -> None:
        """Raises ConfigError where the copies are known to differ; waits for no worker."""
        if self._posted is not None and not self._job.closed:
            self._compare(self._posted, is_over=False)

    def close(self) -> None:
        """Forgets the models."""
        self._posted = None
        self._buffers = {}

    def _exchanges(self) -> int:
        return sum(model._passes.exchanged for model in self._watched.models)

    def _post(self) -> None:
        roll_call = self._job.roll_call
        assert roll_call is not None
        update = self._updates
        tensors, whole = self._copies()
        settings = self._settings()
        sums: dict[str, Any] = settings | checksums(tensors)
        # Without sync_param nothing keeps undivided parameters equal to the bit along mp.
        along_mp = [*settings, *(whole if self._job.options["hybrid_configs"].mp_configs.sync_param else ())]
        said: dict[str, Any] = {
            "digest": digest(sums),
            "along mp": digest({name: sums[name] for name in along_mp}),
            "device": self._device(),
            "buffers": digest({f"{n}": _layout(model) for n, model in enumerate(self._watched.models)}),
        }
        # A sketch reads all parameters: the first update has one, before it is known whether devices are unlike, and
        # later ones only where they are.
        if update == 1 or self._unlike:
            parameters = [tensor for name, tensor in tensors.items() if tensor.is_floating_point()]
            said["sketch"] = sketch(parameters)
        for old in self._old[:-1]:  # a slower worker may still read the newest
            roll_call.post(f"copies/{old}", "")
            roll_call.post(f"copies/{old}/sums", "")
        self._old = [*self._old[-1:], update]
        # The sums first: a worker that reads the digests may read the sums at once.
        roll_call.post(f"copies/{update}/sums", json.dumps([_short(value) for value in sums.values()]))
        roll_call.post(f"copies/{update}", json.dumps(said))
        self._posted = Posted(update, self._exchanges(), list(sums), along_mp)

    def _copies(self) -> tuple[dict[str, Tensor], list[str]]:
        """Returns the tensors that workers along ``COPY_AXES`` hold alike, and the names of those undivided over mp."""
        found: dict[str, Tensor] = {}
        whole: list[str] = []
        if self._watched.trains_locally:
            return found, whole
        for number, model in enumerate(self._watched.models):
            layouts = layouts_of(model.module)
            of_model = f" of model {number}" if number else ""
            for name, p in model.named_parameters():
                if not (is_part(p) or is_expert(p)):
                    found[f"{name}{of_model}"] = p
                    whole += [f"{name}{of_model}"] if name not in layouts else []
        for watch in self._watched.optimizers.values():
            if not watch.is_divided:
                found |= {f"{name}{self._of(watch)}": t for name, t in watch.state(Tensor, "step").items()}
        return found, whole

    def _settings(self) -> dict[str, str]:
        return {
            f"{name}{self._of(watch)}": value
            for watch in self._watched.optimizers.values()
            for name, value in watch.settings().items()
            if not watch.is_divided or name.startswith("lr ")  # other settings may follow from a worker's shard
        }

    def _of(self, watch: OptimizerWatch) -> str:
        number = list(self._watched.optimizers.values()).index(watch)
        return f" of optimizer {number}" if number else ""

    def _device(self) -> list[str]:
        """Returns the properties of this worker on which rounding depends."""
        device = self._job.device
        on_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability()
        threads = "" if on_gpu else f"{torch.get_num_threads()} threads"
        return [f"{device.type} {name}", threads, platform.machine(), f"torch {torch.__version__}"]

    def _compare(self, posted: Posted, is_over: bool = True) -> None:
        """Raises ConfigError where the digests of ``posted.update`` differ; ``is_over``: all workers have posted."""
        if is_over and self._job.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # until here the exchange may only be queued
        axes = self._job.axes
        update = posted.update
        same_rows: list[dict[str, Any]] = []
        copies = axes.ranks(*COPY_AXES)
        parts = axes.ranks("mp")
        for kind, ranks, names in (("digest", copies, posted.names), ("along mp", parts, posted.along_mp)):
            rows = self._read(f"copies/{update}", ranks)
            if not rows:
                if is_over:
                    self._posted = None  # a worker has not made this update, which ExchangedGradients sees
                return
            same_rows = same_rows or rows
            devices = [row["device"] for row in rows]
            self._unlike = self._unlike or next((_difference(a, b) for a, b in _pairs(devices) if a != b), "")
            if len({row[kind] for row in rows}) > 1:
                self._posted = None
                self._tell_apart(posted, names, dict(zip(ranks, rows, strict=True)), is_over)
        if is_over:  # a save is no moment of all workers
            self._posted = None
            self._equal_after = update
            if len({row["buffers"] for row in same_rows}) == 1:
                self._take_in_buffers()

    def _tell_apart(self, posted: Posted, names: Sequence[str], said: Mapping[int, Any], is_over: bool) -> None:
        """Raises ConfigError, or warns where devices differ and the copies are near each other."""
        ranks = list(said)
        values = [
            dict(zip(posted.names, row, strict=False)) for row in self._read(f"copies/{posted.update}/sums", ranks)
        ]
        name = first_difference([{name: row.get(name) for name in names} for row in values])
        held = [row[name] for row in values] if name else [row["digest"] for row in said.values()]
        sides = ranks_by(dict(zip(ranks, held, strict=True)))
        is_setting = bool(name) and isinstance(held[0], str)
        shown = [f"{value} on {listed_ranks(at)}" if is_setting else listed_ranks(at) for value, at in sides.items()]
        before = f"equal after update {self._equal_after}, " if self._equal_after else ""
        text = (
            f"The workers hold different values of {repr(name) if name else 'their parameters'} "
            f"({' against '.join(reversed(shown))}): {before}different after update {posted.update}. "
        )
        sketches = [row["sketch"] for row in said.values() if "sketch" in row]
        if self._unlike and not is_setting and len(sketches) == len(said):
            distance = max(distance_of(a, b) for a, b in _pairs(sketches))
            if distance <= _TOLERANCE:
                self._equal_after = posted.update
                if not self._has_warned:
                    self._has_warned = True
                    warnings.warn(
                        f"{text}They are {distance:.1g} of their size apart, as rounding makes them on different "
                        f"devices: {self._unlike}. Above {_TOLERANCE:g} the job stops.",
                        OptionWarning,
                        stacklevel=5,
                    )
                return
        if is_over and self._job.roll_call is not None:  # the others come to the same end
            self._job.roll_call.leave_topic(f"copies/{posted.update}", len(ranks))
        raise ConfigError(text + _ADVICE)

    def _read(self, topic: str, ranks: Sequence[int]) -> list[Any]:
        roll_call = self._job.roll_call
        return [] if roll_call is None else [json.loads(text) for text in roll_call.posted(topic, ranks).values()]

    def _take_in_buffers(self) -> None:
        """Lets the strategies send buffers that all workers have registered since the last comparison."""
        for model in self._watched.models:
            now = _layout(model)
            if now != self._buffers.get(model):
                self._buffers[model] = now
                for listener in self._job.listeners.hearing["structure_changed"]:
                    listener.structure_changed(model, {})


@torch.no_grad()
def sketch(tensors: Sequence[Tensor]) -> list[float]:
    """Returns the norm of all ``tensors``, and sums of their numbers with random signs, for :func:`distance_of`."""
    found: list[Tensor] = []
    for tensor in tensors:
        signs = _signs_on(tensor.device)
        for part in tensor.detach().reshape(-1).float().split(signs.shape[1]):
            sums = signs[:, : len(part)] @ part * (-1) ** len(found)
            found.append(torch.cat([part.square().sum()[None], sums]).double())
    total = torch.stack([each.to(found[0].device) for each in found]).sum(0).tolist() if found else [0.0]
    return [total[0] ** 0.5, *total[1:]]


@functools.cache
def _signs_on(device: torch.device) -> Tensor:
    return torch.stack([(weights_on(device) >> bit + 8 & 1).float() * 2 - 1 for bit in range(_SKETCH)])


def distance_of(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the approximate distance between the tensors of two sketches, as a share of their norm."""
    # The square of a sum with random signs has the sum of squares as its mean: Alon, Matias and Szegedy, 1996, The
    # space complexity of approximating the frequency moments.
    squares = [(a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)]
    return float((sum(squares) / max(len(squares), 1)) ** 0.5 / max(one[0], 1e-30))


def _pairs(rows: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(rows[0], row) for row in rows[1:]]


def _difference(one: Sequence[str], other: Sequence[str]) -> str:
    return "; ".join(f"{a} and {b}" for a, b in zip(one, other, strict=True) if a != b)


def _layout(model: WrappedModel) -> dict[str, str]:
    """Returns shape and type of each buffer of ``model``."""
    return {name: f"{tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()}


def _short(value: Any) -> Any:
    # Enough to tell values apart, in half the bytes; digests compare all bits.
    return value % (1 << 32) if isinstance(value, int) else value
