"""HybridModel: a worker's own dense parameters, equal on all trainers, and a copy of them on the servers for saves.

Each save updates the dense tables on the servers, so that the save contains them and ``init_server(dirname)`` can start
a job from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleet.common.own_thread import OwnThread
from fleet.common.plain_files import replacing
from fleet.errors import CheckpointError, NotInitializedError
from fleet.ps.client.client import NothingLoaded
from fleet.ps.worker.connection import WorkerConnection
from fleet.ps.worker.dense_exchange import DenseExchange, TrainerGroup
from fleet.ps.worker.dense_part import DensePart
from fleet.ps.worker.served_model import ServedModel, Unserved
from fleet.ps.worker.untrained import read_state_file

STATE_FILE = "trainer.pt"  # in a save: the state of the trainers' optimizer
_FILE, _PROBLEM = b"1", b"0"  # before what trainer 0 has read, and before the reason why it has read nothing


class HybridModel(ServedModel):
    """A model whose dense parameters the trainers step with the user's optimizer.

    Args:
        connection: exchanges the sparse tables only; the dense ones of its plan were planned with ``dense_here``.
        optimizer: the user's optimizer.
        trainers: all trainers of the job.

    Attributes:
        tensors: every tensor outside the sparse tables, also those that nothing trains: trainers begin with equal ones.
        dense: the exchange of gradients with the other trainers; ``None`` once training has ended.
    """

    def __init__(self, connection: WorkerConnection, optimizer: Optimizer, trainers: TrainerGroup) -> None:
        super().__init__(connection)
        rows = {id(module.weight) for module in self.plan.modules}
        tensors = [tensor for model in self.plan.models for tensor in (*model.parameters(), *model.buffers())]
        tensors += [parameter for part in self.plan.dense for parameter in part.parameters]
        self.tensors = list({id(t): t for t in tensors if id(t) not in rows and t.numel()}.values())
        self._optimizer = optimizer
        self._size = trainers.size
        self._left = 0  # trainers that had called stop_worker() at the last meeting
        self.dense: DenseExchange | None = DenseExchange(self.plan.dense, optimizer, trainers)

    def own(self) -> DenseExchange:
        """Returns the exchange with the other trainers; raises NotInitializedError once training has ended."""
        if self.dense is None:
            raise NotInitializedError("training has ended: fleet.stop_worker() was called.")
        return self.dense

    def read(self, dirname: str) -> Unserved:
        """Returns the buffers and the optimizer's state of a save, as trainer 0 has read them."""
        tensors, _ = super().read(dirname)
        return tensors, self._read_state(dirname)

    def read_file(self, path: Path, absent: str) -> bytes | None:
        """Returns the file as trainer 0 has read it; its error is raised on every trainer."""
        answer = b""
        if self.connection.client.config.rank == 0:
            try:
                found = super().read_file(path, absent)
                answer = b"" if found is None else _FILE + found
            except CheckpointError as error:  # raised once the others know that there is nothing to load
                answer = _PROBLEM + f"{error}".encode()
        answer = self.own().share(answer)
        if answer[:1] == _PROBLEM:
            raise CheckpointError(answer[1:].decode())
        return answer[1:] if answer else None

    def use(self, unserved: Unserved, is_start: bool = False) -> None:
        """Takes buffers and the optimizer's state; without one in the save of a start, the optimizer keeps its own."""
        super().use(unserved)
        if unserved[1] or not is_start:
            groups = self._optimizer.state_dict()["param_groups"]  # rates stay those of this run
            self._optimizer.state.clear()
            self._optimizer.load_state_dict({"state": unserved[1], "param_groups": groups})

    def stand(self, name: str, call: str, wish: str = "") -> str | None:
        """Stands at a barrier, and takes part in the steps of those that still train."""
        # The servers must know that this trainer stands here while it still takes part in the others' steps.
        standing = OwnThread(self.connection.client.barrier, name, call, wish, name="barrier", say=None)
        standing.start()
        self._left = self.own().stand_by(leaving=False)
        key: str | None = standing.result()
        return key

    def before_save(self, dirname: str, tables: list[int] | None) -> None:
        """Waits until trainer 0 has given the servers its parameters, and has written the state of its optimizer."""
        if self.connection.client.config.rank == 0:
            self._give_own(dirname, tables)
        self.own().stand_by(leaving=False)  # or raises, if trainer 0 is gone

    def _give_own(self, dirname: str, tables: list[int] | None) -> None:
        client = self.connection.client
        if self.plan.dense:
            client.wait(client.set_dense({part.table_id: part.values() for part in self.plan.dense}))
        if tables is None:
            Path(dirname).mkdir(parents=True, exist_ok=True)
            with replacing(Path(dirname) / STATE_FILE) as file:
                torch.save(self._optimizer.state_dict()["state"], file)

    def prepare_load(self, dirname: str, tables: list[int] | None) -> Unserved | None:
        """Returns :meth:`read`, before any server loads; raises NothingLoaded where a trainer has left."""
        if self._left:
            raise NothingLoaded(
                f"fleet.load_model(): {self._left} of {self._size} trainers have called stop_worker() already, but "
                "hybrid training gives what was loaded to all of them. Load before the first one stops."
            )
        return super().prepare_load(dirname, tables)

    def take_loaded(self) -> None:
        """Begins to exchange anew; the dense parameters are those of the trainers, not of the servers."""
        self.plan.forget_gradients()
        self.connection.restart()

    def finish_load(self, dirname: str, tables: list[int] | None, unserved: Unserved | None) -> None:
        """Takes the dense parameters of the save from the servers' copy, buffers and the optimizer's state."""
        client = self.connection.client
        read = {part.table_id: None for part in self.plan.dense if tables is None or part.table_id in tables}
        values = client.wait(client.pull(read, wait_for_others=False)) if read else {}
        for part in self.plan.dense:
            if part.table_id in values:
                part.assign(values[part.table_id])
        super().finish_load(dirname, tables, unserved)

    def leave(self) -> None:
        """Takes part in the others' steps until all trainers leave."""
        self.own().stand_by(leaving=True)

    def release(self) -> None:
        """Lets go of the other trainers."""
        self.dense = None

    def _take_parameters(self, resumes: bool = False) -> None:
        """Takes the servers' copy on trainer 0, from which the others get theirs."""
        if self.connection.client.config.rank == 0 and not resumes:
            super()._take_parameters()

    def _read_state(self, dirname: str) -> dict[Any, Any]:
        """Returns the optimizer state of the save; an empty one where it is absent, as is said.

        Raises:
            CheckpointError: it is damaged, or that of other parameters; every trainer raises it.
        """
        path = Path(dirname) / STATE_FILE
        data = self.read_file(path, "the optimizer of the dense parameters starts afresh")
        if data is None:
            return {}
        state = read_state_file(f"{path}", data)
        try:
            if any(isinstance(k, int) and not isinstance(state[k], dict) for k in state):
                raise CheckpointError(f"{path} is not an optimizer state, which has a dict for each parameter.")
            check_state(f"{path}", state, self._optimizer, self.plan.dense)
        except CheckpointError as error:
            raise CheckpointError(f"{error} Nothing was loaded.") from error
        return state


_REMEDY = "If only the optimizer differs, remove the file to begin with a new state."


def check_state(label: str, state: Mapping[Any, Any], optimizer: Optimizer, parts: Sequence[DensePart]) -> None:
    """Raises CheckpointError where ``state`` cannot be that of ``optimizer`` and the parameters it trains here.

    What the optimizer holds already has the right names and shapes. Without it, torch's own optimizers keep tensors of
    the parameter's shape and plain numbers, but for those that keep sums over rows or of all parameters.
    """
    names = {id(p): part.name_of(number) for part in parts for number, p in enumerate(part.parameters)}
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    is_known = is_known and not isinstance(optimizer, torch.optim.LBFGS | torch.optim.Adafactor)
    held = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    for number, (parameter, group) in enumerate(held):
        found = state.get(number, {})
        if id(parameter) not in names or not found:
            continue
        place = f"parameter {number}, {names[id(parameter)]},"
        own = optimizer.state.get(parameter, {})
        kept = set(own) or (_kept_by(optimizer, group) if is_known else None)
        if kept is not None and (not kept or kept - set(found)):
            raise CheckpointError(
                f"{label} has {_listed(set(found))} for {place} and {type(optimizer).__name__} keeps {_listed(kept)} "
                f"here: this is the state of another optimizer. Load a save of this job. {_REMEDY}"
            )
        for key, value in found.items():
            if not isinstance(value, Tensor):
                continue
            wanted = own.get(key)
            if not isinstance(wanted, Tensor):
                if not is_known or not value.ndim:
                    continue
                wanted = parameter
            if value.shape != wanted.shape and not value.numel() == wanted.numel() == 1:
                raise CheckpointError(
                    f"{label}: {key!r} of {place} has the shape {list(value.shape)}; {type(optimizer).__name__} keeps "
                    f"{list(wanted.shape)} for it here. Load a save of this model. {_REMEDY}"
                )


def _kept_by(optimizer: Optimizer, group: Mapping[str, Any]) -> set[str] | None:
    """Returns the names of the state that an optimizer of torch keeps for a parameter; ``None`` if unknown."""
    kind: Any = type(optimizer)
    options = {name: group[name] for name in inspect.signature(kind).parameters if name in group and name != "params"}
    one = torch.zeros(1, requires_grad=True)
    one.grad = torch.zeros(1)
    try:
        with torch.no_grad():
            alike = kind([one], **options)
            inspect.unwrap(kind.step)(alike)  # without the hooks that watch the steps of the job
    except (RuntimeError, TypeError, ValueError):  # it needs a GPU, a closure or sparse gradients
        return None
    return set(alike.state[one])


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "nothing"
