"""Pieces: what one worker reads of a checkpoint in which every worker has written its share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from fleet.checkpoint.index import INDEX, Index
from fleet.checkpoint.items import SavedTensors, Wanted
from fleet.checkpoint.loading import misfits_of
from fleet.checkpoint.model_tensors import ModelTensors
from fleet.checkpoint.optimizer_tensors import whole_state
from fleet.checkpoint.saved_objects import OBJECTS, takers_of
from fleet.checkpoint.saving import axes_of
from fleet.checkpoint.state_taker import StateTaker
from fleet.checkpoint.storage import LocalFolder
from fleet.checkpoint.to_group import StateMesh
from fleet.checkpoint.values import decode, tensor_names
from fleet.elastic._folder import check_no_link
from fleet.elastic._mean_of_workers import MeanOfWorkers, has_own_states, reason_against_mean
from fleet.elastic._places import is_same_mesh, predecessor
from fleet.elastic._resize import LR_SCALE
from fleet.elastic._torch_files import check_form
from fleet.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fleet.job.session import Session

_VISIBLE_S = 5.0
_POLL_S = 0.02


def sum_of_index(path: Path) -> str:
    """Returns the SHA-256 of the index of the checkpoint at ``path``. Raises CheckpointError."""
    try:
        return hashlib.sha256(LocalFolder(path).get(INDEX)).hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path.name}: {INDEX}: {error.strerror or error}") from error


class Pieces:
    """Reads this worker's part of one checkpoint.

    Args:
        session: the job.
        path: the checkpoint.
        model: what it is loaded into.
        optimizer: likewise.

    Attributes:
        rest: what is neither of the model nor of the optimizer.
        misfits: why the checkpoint is not one of this model and optimizer.
        is_mean: each worker has saved a state of its own, and other workers continue from their mean.
    """

    def __init__(self, session: Session, path: Path, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._session, self._path = session, path
        self._given = {"model": model, "optimizer": optimizer}
        self._source: SavedTensors | None = None
        self._takers: list[StateTaker] = []
        self._plan: dict[StateTaker, Wanted] = {}
        self.rest: dict[str, Any] = {}
        self.misfits: list[str] = []
        self.is_mean = False

    def open(self, index_sum: str, elsewhere: Iterable[str]) -> tuple[str, bool]:
        """Reads the index and verifies the bytes that this worker needs.

        Args:
            index_sum: the SHA-256 of the index, as worker 0 has read it.
            elsewhere: the names of the state that other stages of a pipeline hold.

        Returns:
            What is damaged, or an empty text, and whether this worker does not see what worker 0 sees.
        """
        deadline = time.monotonic() + _VISIBLE_S
        while not (seen := self._has(index_sum)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if not seen:
            return "", True
        try:
            check_no_link(self._path)
            folder = LocalFolder(self._path)
            index = Index.from_json(folder.get(INDEX), f"{self._path.name}/{INDEX}")
            self._source = source = SavedTensors(folder, index)
            self.rest = self._read_rest(source)
            own = has_own_states(index)
            self.is_mean = own and not is_same_mesh(self.rest, self._session)
            if self.is_mean:
                if reason := reason_against_mean(self._path.name, self.rest):
                    self.misfits = [reason]
                    return "", False
                self._source = source = MeanOfWorkers(folder, index, self.rest["world_size"])
            kinds = index.values.get(OBJECTS, {})
            given = {key: found for key, found in self._given.items() if found is not None and key in kinds}
            axes = axes_of(self._session)
            self._takers = takers_of(given, self._session, axes, "Checkpoint.resume()", own and not self.is_mean)
            for taker in self._takers:
                if isinstance(taker, ModelTensors):
                    taker.elsewhere = frozenset(elsewhere)
            self.misfits = misfits_of(self._takers, source)
            if not self.misfits:
                self._plan = {taker: taker.wanted(source) for taker in self._takers}
                source.verify_all(self._plan.values())
        except CheckpointError as error:
            return f"{error}".rstrip("."), False
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{self._path.name} is damaged ({type(error).__name__}: {error})", False
        return "", False

    def whole(self) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        """Returns the whole state of model and optimizer, and the rest, for workers that do not see the folder.

        Raises ConfigError where a pipeline or experts divide the names among workers, CheckpointError for damage.
        """
        source = self._source
        assert source is not None
        if has_own_states(source.index):
            raise CheckpointError("it holds a state for each worker, and not every worker sees it")
        degrees = {**source.index.job["degrees"], **self._session.axes.degrees}
        if StateMesh(self._session.axes, self._session.device).has_stages or any(
            degrees.get(axis, 1) > 1 for axis in ("pp", "ep")
        ):
            raise ConfigError(
                "not every worker sees it, and with a pipeline or experts each reads its own part. Name a folder that "
                "all of them share."
            )
        optimizer = whole_state(source, "optimizer") if "optimizer" in source.index.values[OBJECTS] else None
        encoded = {"run": source.index.values["run"], "scheduler": source.index.values.get("scheduler")}
        found = decode(encoded, source.whole)
        begin = "model/"
        model = {
            n.removeprefix(begin): source.whole(n)
            for n in (*source.index.tensors, *source.index.aliases)
            if n.startswith(begin)
        }
        for name, value in source.index.values.items():
            if name.startswith(begin):
                for inner in tensor_names(value):
                    model.pop(inner.removeprefix(begin), None)
                model[name.removeprefix(begin)] = decode(value, source.whole)
        source.close()
        return model, optimizer, {**found["run"], "scheduler": found["scheduler"]}

    def load(self, optimizer: Optimizer | None) -> None:
        """Loads model and optimizer. Raises CheckpointError where the checkpoint is one of another model."""
        if self.misfits:
            raise CheckpointError(" ".join(f"{text}." for text in self.misfits))
        for group in () if optimizer is None else optimizer.param_groups:
            group.pop(LR_SCALE, None)  # what the checkpoint has counts, and may be none
        assert self._source is not None
        self._source.fill_all(self._plan.values())
        for taker, wanted in self._plan.items():
            taker.put(self._source, wanted)
        self._source.close()

    def _has(self, index_sum: str) -> bool:
        try:
            return sum_of_index(self._path) == index_sum
        except CheckpointError:
            return False

    def _read_rest(self, source: SavedTensors) -> dict[str, Any]:
        """Returns what was saved beside model and optimizer; of the random generators, this worker's only."""
        label = f"{self._path.name}: run"
        encoded = source.index.values["run"]
        workers = [{key: value for key, value in worker.items() if key != "random"} for worker in encoded["workers"]]
        rest: dict[str, Any] = decode({**encoded, "workers": workers}, source.whole)
        check_form(rest, "run", label)
        mine: Any = predecessor(rest, self._session)
        for worker, whole in zip(rest["workers"], encoded["workers"], strict=True):
            if worker is mine:
                worker["random"] = decode(whole["random"], source.whole)
                check_form(worker["random"], "random", label)
        scheduler = source.index.values.get("scheduler")
        return {**rest, "scheduler": None if scheduler is None else decode(scheduler, source.whole)}
