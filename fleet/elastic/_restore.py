"""Finds the newest complete checkpoint, in agreement with the other workers, and loads it on every worker."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fleet._log import LOGGER
from fleet.elastic._folder import Entry, candidates, check_whole, has_index, is_unfinished, read_entry
from fleet.elastic._pieces import Pieces, sum_of_index
from fleet.elastic._places import is_same_mesh, predecessor
from fleet.elastic._resize import declared_scales, rescale, warn_of_resize
from fleet.elastic._state import (
    kinds_of,
    module_of,
    optimizer_state,
    put_model,
    put_optimizer,
    put_random,
    states_of,
    tensor_rows,
    windows,
    without_tensors,
)
from fleet.elastic._torch_files import check_form, open_part, parse_part, read_part
from fleet.errors import CheckpointError, ConfigError, OptionWarning
from fleet.strategies._shared.exchanged_texts import broadcast_bits
from fleet.strategies._shared.parameter_layout import cut
from fleet.training.fleet_optimizer import FleetOptimizer

if TYPE_CHECKING:
    from fleet.job.session import Session

_BLOCK_BYTES = 1 << 28


@dataclass
class Found:
    """The checkpoint that every worker loads.

    ``rest`` is what all workers need. Worker 0 holds ``model`` and the bytes of ``optimizer``. Of a checkpoint with an
    index, whose sum is ``index_sum``, each worker has ``pieces``.
    """

    name: str
    world_size: int
    rest: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] | None = None
    optimizer: bytes = b""
    index_sum: str = ""
    pieces: Pieces | None = None


class Restore:
    """Loads one checkpoint of ``folder`` into ``model`` and ``optimizer`` on all workers of ``session``."""

    def __init__(self, session: Session, folder: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._session, self._folder = session, folder
        self._model, self._optimizer = model, optimizer
        self._is_first = session.global_rank == 0

    def find(self) -> Found | None:
        """Returns the newest complete checkpoint, or None; a collective call."""
        waiting = self._whole_ones() if self._is_first else iter(())
        while True:
            problem = ""
            try:
                found, rest = next(waiting, (None, b""))
            except CheckpointError as error:  # the folder cannot be read: every worker must know
                found, rest, problem = None, b"", f"{error}"
            text = json.dumps([found.name, found.world_size, found.index_sum] if found else problem or None)
            said = json.loads(self._broadcast(text.encode()))
            if said is None:
                return None
            if isinstance(said, str):
                raise CheckpointError(said)
            if found is None:
                name, world_size, index_sum = said
                found = Found(name, world_size, index_sum=index_sum)
            if found.index_sum:
                problems = self._read_pieces(found)
            else:
                found.rest = parse_part(io.BytesIO(self._broadcast(rest)), f"{found.name}: rest.pt")
                problems = []
            if not problems:
                return found
            if self._is_first:
                _warn_of(self._folder, problems[0])

    def load(self, found: Found, model: nn.Module, optimizer: Optimizer | None, scheduler: Any) -> dict[str, Any]:
        """Restores model, optimizer and scheduler; returns the rest. Raises CheckpointError when they do not match."""
        declared = declared_scales(optimizer)
        try:
            self._check_kinds(found, kinds_of(optimizer, scheduler))
            if found.pieces is not None:
                self._warn_of_mean(found, found.pieces)
                with self._without_word_of_other_workers(optimizer):
                    found.pieces.load(optimizer)
            else:
                self._load_whole(found, model, optimizer)
            if scheduler is not None and found.rest["scheduler"] is not None:
                scheduler.load_state_dict(found.rest["scheduler"])
        except (CheckpointError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            if f"{error}".startswith("Checkpoint.resume()"):
                raise
            raise CheckpointError(
                f"Checkpoint.resume(): {str(self._folder)}/{found.name} does not match: {f'{error}'.rstrip('.')}. "
                "Start training another model in a separate folder."
            ) from error
        if optimizer is not None:
            rescale(optimizer, scheduler, declared)
            now = max((w["k_steps"] for w in windows(optimizer_state(optimizer)).values()), default=1)
            warn_of_resize(found.rest, self._session, now, declared)
        return found.rest

    def _check_kinds(self, found: Found, now: dict[str, str]) -> None:
        """Raises CheckpointError where the state of one class would be loaded into another; nothing is loaded yet."""
        for role, saved in found.rest.get("kinds", {}).items():
            if now.get(role, saved) != saved:
                raise CheckpointError(
                    f"Checkpoint.resume(): {str(self._folder)}/{found.name} was saved with the {role} {saved}, and "
                    f"this job has {now[role]}. Continue with {saved}, or start in a separate folder."
                )

    def data_of(self, rest: dict[str, Any], is_shared: bool, join: Callable[[list[Any]], Any] | None = None) -> Any:
        """Returns the position in the data for this worker; raises CheckpointError when it is unknown.

        ``join`` makes one position of those of all workers, for data that can be divided anew.
        """
        positions = [worker["data"] for worker in rest["workers"]]
        mine = predecessor(rest, self._session)
        if mine is not None:
            return mine["data"]
        if is_shared or all(position == positions[0] for position in positions):
            return positions[0]
        if join is not None:
            return join(positions)
        raise CheckpointError(
            f"Checkpoint.resume(): {len(positions)} workers saved a position in the data each, and there "
            f"are {self._session.world_size} now. Use fleet.elastic.ElasticSampler, which any number can resume."
        )

    def put_random(self, rest: dict[str, Any]) -> None:
        """Restores the random generators of this worker, if as many workers train on different data as at the save.

        On another mesh the workers of one model copy get the same global generators, and streams by name begin anew.
        """
        mine = predecessor(rest, self._session)
        if mine is not None:
            put_random(mine["random"], streams=is_same_mesh(rest, self._session))

    def _whole_ones(self) -> Iterator[tuple[Found, bytes]]:
        """Yields, on worker 0, the checkpoints whose files are intact as far as it reads them, newest first."""
        for path in candidates(self._folder):
            if is_unfinished(path):
                LOGGER.info("%s is a save that did not finish; it is passed over.", path)
                continue
            try:
                check_whole(path)
                if has_index(path):
                    yield Found(path.name, 0, index_sum=sum_of_index(path)), b""
                    continue
                entry = read_entry(path)
                found = Found(path.name, entry.world_size)
                rest = _checked_bytes(entry, "rest.pt")
                found.model = read_part(entry, "model.pt")
                found.optimizer = _checked_bytes(entry, "optimizer.pt")
                yield found, rest
            except CheckpointError as error:
                _warn_of(self._folder, f"{error}")

    def _read_pieces(self, found: Found) -> list[str]:
        """Verifies what this worker needs of a checkpoint with an index; returns what is damaged on any worker.

        Where some worker does not see the folder, worker 0 reads for all.
        """
        names = states_of(self._model, self._session).elsewhere
        pieces = Pieces(self._session, self._folder / found.name, self._model, self._optimizer)
        damage, is_blind = pieces.open(found.index_sum, names)
        said = [
            json.loads(f"{text}")
            for text in self._session.util.all_gather(
                json.dumps([damage and f"{damage} (worker {self._session.global_rank})", is_blind, pieces.misfits])
            )
        ]
        if (damaged := [text for text, _, _ in said if text]) or not any(is_blind for _, is_blind, _ in said):
            pieces.misfits = next((texts for _, _, texts in said if texts), [])
            found.pieces, found.rest, found.world_size = pieces, pieces.rest, int(pieces.rest.get("world_size", 0))
            return damaged
        return self._read_for_others(found, pieces)

    def _read_for_others(self, found: Found, pieces: Pieces) -> list[str]:
        """Reads the whole state on worker 0, whose disk alone has it, and the rest on every worker."""
        problem, refusal, data = "", "", b""
        if self._is_first:
            try:
                found.model, optimizer, rest = pieces.whole()
                found.optimizer, data = _bytes_of(optimizer), _bytes_of(rest)
            except ConfigError as error:
                refusal = f"Checkpoint.resume(): {str(self._folder)}/{found.name}: {error}"
            except CheckpointError as error:
                problem = f"{found.name}: {error}"
        said, refused = json.loads(f"{self._session.util.all_gather(json.dumps([problem, refusal]))[0]}")
        if refused:
            raise ConfigError(refused)
        if said:
            return [said]
        found.rest = parse_part(io.BytesIO(self._broadcast(data)), f"{found.name}: run")
        found.world_size = int(found.rest["world_size"])
        return []

    def _load_whole(self, found: Found, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._put_model(model, found.model)
        if isinstance(optimizer, FleetOptimizer) and optimizer.is_part and self._session.job.host_group is not None:
            self._put_optimizer(optimizer, self._own_share(found, optimizer))
            return
        data = self._broadcast(found.optimizer)
        self._put_optimizer(optimizer, parse_part(io.BytesIO(data), f"{found.name}: optimizer.pt"))

    def _own_share(self, found: Found, optimizer: FleetOptimizer) -> Any:
        """Returns what this worker needs of the whole optimizer state that worker 0 has read; one tensor at a time."""
        state = parse_part(io.BytesIO(found.optimizer), f"{found.name}: optimizer.pt") if self._is_first else None
        buffer = io.BytesIO()
        if self._is_first:
            torch.save(None if state is None else without_tensors(state), buffer)
        share = parse_part(io.BytesIO(self._broadcast(buffer.getvalue())), f"{found.name}: optimizer.pt")
        if share is None:
            return None
        rows = json.loads(self._broadcast(json.dumps(tensor_rows(state or {})).encode()))
        held = optimizer.held(share)
        for place, key, kind, shape in rows:
            if state is not None:
                whole = state["state"][place].pop(key).contiguous()
            else:
                whole = torch.empty(shape, dtype=getattr(torch, kind), device="cpu")
            broadcast_bits(whole, 0, self._session.job.host_group)
            if place in held:
                share["state"].setdefault(place, {})[key] = cut(whole, held[place])
        return share

    def _warn_of_mean(self, found: Found, pieces: Pieces) -> None:
        if pieces.is_mean and not pieces.misfits and self._is_first:
            warnings.warn(
                f"Checkpoint.resume(): {found.name} holds a state for each of {found.world_size} workers, and there "
                f"are {self._session.world_size} now: they continue from the mean of the models and worker 0's "
                "optimizer; what the others had not yet sent is lost.",
                OptionWarning,
                stacklevel=5,
            )

    def _put_model(self, model: nn.Module, state: dict[str, Any] | None) -> None:
        """Loads worker 0's ``state`` on every worker, tensor by tensor where it holds only tensors."""
        if self._session.world_size == 1:
            put_model(model, self._session, state or {})
        elif not self._has_values(model, state):
            states_of(model, self._session).load_from_rank_0(state or {})
        else:
            buffer = io.BytesIO()
            if self._is_first:
                torch.save(state, buffer)
            put_model(model, self._session, parse_part(io.BytesIO(self._broadcast(buffer.getvalue())), "model.pt"))

    def _has_values(self, model: nn.Module, state: dict[str, Any] | None) -> bool:
        """Returns whether some worker's module, or the ``state`` of worker 0, holds more than tensors."""
        held = [*module_of(model).state_dict().values(), *(state or {}).values()]
        own = int(not all(isinstance(value, Tensor) for value in held))
        return any(int(found) for found in self._session.util.all_gather(own))

    def _put_optimizer(self, optimizer: Optimizer | None, state: Any) -> None:
        if optimizer is None or state is None:
            return
        with self._without_word_of_other_workers(optimizer):
            put_optimizer(optimizer, state)

    @contextmanager
    def _without_word_of_other_workers(self, optimizer: Optimizer | None) -> Iterator[None]:
        with warnings.catch_warnings():
            if self._session.world_size > 1 and isinstance(optimizer, FleetOptimizer):
                # dgc would repeat for one worker's state what _warn_of_mean has said about all.
                warnings.filterwarnings("ignore", message="dgc: this state was saved by worker", category=OptionWarning)
            yield

    def _broadcast(self, data: bytes) -> bytes:
        """Returns worker 0's ``data`` on every worker."""
        group = self._session.job.host_group
        if group is None:
            return data
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        dist.broadcast(size, src=0, group=group)
        whole = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        if self._is_first and data:
            whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for begin in range(0, int(size), _BLOCK_BYTES):
            dist.broadcast(whole[begin : begin + _BLOCK_BYTES], src=0, group=group)
        return data if self._is_first else whole.numpy().tobytes()


def _bytes_of(obj: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def _checked_bytes(entry: Entry, name: str) -> bytes:
    """Returns the bytes of one file after checking what it holds. Raises CheckpointError."""
    with open_part(entry, name) as file:
        data = file.read()
    label = f"{entry.path.name}: {name}"
    check_form(parse_part(io.BytesIO(data), label), name, label)
    return data


def _warn_of(folder: Path, problem: str) -> None:
    where = "" if problem.startswith(f"{os.path.abspath(folder)}/") else f"{folder}/"  # an index names its whole path
    warnings.warn(
        f"Checkpoint.resume(): {where}{problem.rstrip('.')}. It is skipped, and the one before it is tried.",
        UserWarning,
        stacklevel=2,
    )
