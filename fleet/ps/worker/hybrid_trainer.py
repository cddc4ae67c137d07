"""HybridTrainer: a worker with its rows on the servers and its own dense parameters, equal on all trainers.

The dense tables on the servers are a copy that each save updates, so that the save contains them and
``init_server(dirname)`` can start a job from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fleet.common.own_thread import OwnThread
from fleet.common.plain_files import replacing
from fleet.errors import CheckpointError, NanInfError, NotInitializedError
from fleet.ps.client.client import Client, NothingLoaded
from fleet.ps.worker.dense_exchange import DenseExchange, TrainerGroup, check_same_round, not_finite
from fleet.ps.worker.dense_part import DensePart
from fleet.ps.worker.table_plan import TablePlan
from fleet.ps.worker.trainer import Trainer, TrainerConfig
from fleet.ps.worker.untrained import read_state_file

STATE_FILE = "trainer.pt"  # in a save: the state of the trainers' optimizer
_FILE, _PROBLEM = b"1", b"0"  # before what trainer 0 has read, and before the reason why it has read nothing


class HybridTrainer(Trainer):
    """Averages dense gradients over the trainers, steps the user's optimizer here, and hands rows to the servers.

    Args:
        plan: the tables; the dense ones were planned with ``dense_here``.
        config: how rows are trained: sync or async.
        make_client: see :class:`Trainer`.
        optimizer: the user's optimizer.
        trainers: all trainers of the job.
        tensors: parameters and buffers that every trainer takes from trainer 0 at the start.
    """

    def __init__(
        self,
        plan: TablePlan,
        config: TrainerConfig,
        make_client: Callable[[int], Client],
        optimizer: Optimizer,
        trainers: TrainerGroup,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        super().__init__(plan, config, make_client)
        self._optimizer = optimizer
        self._tensors = list(tensors)
        self._size = trainers.size
        self._left = 0  # trainers that had called stop_worker() at the last meeting
        self._exchanged = TablePlan(sparse=plan.sparse)
        self._dense: DenseExchange | None = DenseExchange(plan.dense, optimizer, trainers)

    # -- start and end -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connects; afterwards every trainer has trainer 0's parameters and buffers.

        Trainer 0 starts from the servers' copy, if they have one from a save, or from its own parameters if it was
        given a checkpoint.

        Raises:
            PSError: the trainers were given checkpoints of different steps.
        """
        super().open()
        dense = self._own()
        client = self.client
        dense.copy_from_0(self._tensors)
        found = dense.gather([dense.rounds, client.step])  # by rank
        check_same_round([rounds for rounds, _ in found])
        # Without checkpoints: the servers may have one step more from one trainer than from another.
        if client.staleness is not None:
            client.step = max(step for _, step in found)

    def abandon(self) -> None:
        """Disconnects without a goodbye, and releases the other trainers."""
        super().abandon()
        self._dense = None

    # -- training ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Averages the dense gradients over the trainers and steps with them; sends those of rows to the servers.

        Raises:
            NanInfError: a gradient of this trainer or another is not finite and the check is on; nothing was updated.
            PSError: a server is lost for longer than the deadline, or a trainer is gone.
        """
        exchange = self._running()
        rows = self._gather_gradients()
        dense = self._own()
        self._average(rows, dense)
        # Gradients of rows leave once every trainer has computed with the old rows: a trainer that repeats a step after
        # a failure then computes with the same rows, although the servers may hold a gradient of that step already.
        self._send_rates()
        increment_version(self._weights)
        exchange.put(rows)
        dense.step()

    def is_stepping(self) -> bool:
        """Returns whether the trainer steps the user's optimizer at this moment, also for the steps of others."""
        return self._dense is not None and self._dense.is_stepping

    def non_finite_rows(self) -> str:
        """Names a bad row, for a check that makes this trainer raise instead of stepping; the others raise as well."""
        found = super().non_finite_rows()
        dense = self._own()
        dense.start(bad=True)
        dense.finish()
        return found

    def _stand(self, name: str, call: str, wish: str = "") -> str | None:
        """Stands at a barrier, and takes part in the steps of those that still train."""
        # The servers must know that this trainer stands here while it still takes part in the others' steps.
        standing = OwnThread(self.client.barrier, name, call, wish, name="barrier", say=None)
        standing.start()
        self._left = self._own().stand_by(leaving=False)
        key: str | None = standing.result()
        return key

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a restarted worker needs, and the number of its updates."""
        state = super().state_dict()
        return state if self._dense is None or self._client is None else {**state, "rounds": self._dense.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        """Goes back to a checkpoint; all trainers load checkpoints of the same step."""
        super().load_state_dict(state)
        self._own().rounds = int(state.get("rounds", 0))

    # -- files ---------------------------------------------------------------------------------------------------

    def load(self, dirname: str, tables: list[int] | None = None) -> None:
        """Makes the servers load a save; all continue with its rows, parameters and optimizer state.

        Raises:
            CheckpointError: the optimizer state is damaged, or that of other parameters; servers and trainers are as
                before.
            NothingLoaded: a server has refused the save, or a trainer has left; servers and trainers are as before.
            PSError: a server failed while it loaded, and may have a part. Dense parameters are as before.
        """
        client = self.client
        states: list[dict[Any, Any]] = []
        found: list[dict[str, Tensor]] = []

        def act(key: str) -> int:
            if self._left:
                raise NothingLoaded(
                    f"fleet.load_model(): {self._left} of {self._size} trainers have called stop_worker() already, but "
                    "hybrid training gives what was loaded to all of them. Load before the first one stops."
                )
            if tables is None:
                found.append(self._read_untrained(dirname))
                states.append(self._read_state(dirname))
            return client.load(dirname, tables=tables, key=key)

        self._load_together(dirname, tables, act)
        read = {part.table_id: None for part in self.plan.dense if tables is None or part.table_id in tables}
        values = client.wait(client.pull(read, wait_for_others=False)) if read else {}
        for part in self.plan.dense:
            if part.table_id in values:
                part.assign(values[part.table_id])
        if tables is None:
            self.plan.untrained.assign(found[0] if found else self._read_untrained(dirname))
            self._use_state(states[0] if states else self._read_state(dirname))

    # -- inside --------------------------------------------------------------------------------------------------

    def _own(self) -> DenseExchange:
        if self._dense is None:
            raise NotInitializedError("training has ended: fleet.stop_worker() was called.")
        return self._dense

    def _after_goodbye(self) -> None:
        """Takes part in the others' steps until all trainers leave."""
        self._own().stand_by(leaving=True)

    def _take_parameters(self, client: Client) -> None:
        """Takes the servers' copy on trainer 0, from which the others get theirs."""
        if client.config.rank == 0 and self._pending is None:
            super()._take_parameters(client)

    def _take_origin(self, origin: str) -> None:
        """Takes the buffers and the optimizer's state of the save."""
        super()._take_origin(origin)
        state = self._read_state(origin) if origin else {}
        if state and self._pending is None:
            self._use_state(state)

    def _take_loaded(self, client: Client) -> None:
        """Begins to exchange anew; the dense parameters are those of the trainers, not of the servers."""
        self.plan.forget_gradients()
        self._restart_exchange(client)

    def _average(self, rows: dict[int, Any], dense: DenseExchange) -> None:
        """Replaces the dense gradients with their mean over the trainers; raises on all when one has a bad gradient."""
        if self.config.check_finite:
            local = {part.table_id: part.gradients() for part in self.plan.dense}
            try:
                self._check_finite({**rows, **{key: value for key, value in local.items() if value is not None}})
            except NanInfError:
                dense.start(bad=True)
                dense.finish()
                raise
        dense.start()
        bad = dense.finish().bad
        if bad:
            raise not_finite(self.client.config.rank, bad)

    def _before_save(self, dirname: str, tables: list[int] | None) -> None:
        """Waits until trainer 0 has given the servers its parameters, and has written the state of its optimizer."""
        if self.client.config.rank == 0:
            self._give_own(dirname, tables)
        self._own().stand_by(leaving=False)  # or raises, if trainer 0 is gone

    def _give_own(self, dirname: str, tables: list[int] | None) -> None:
        client = self.client
        if self.plan.dense:
            client.wait(client.set_dense({part.table_id: part.values() for part in self.plan.dense}))
        if tables is None:
            Path(dirname).mkdir(parents=True, exist_ok=True)
            with replacing(Path(dirname) / STATE_FILE) as file:
                torch.save(self._optimizer.state_dict()["state"], file)

    def _file_of(self, path: Path, absent: str) -> bytes | None:
        """Returns the file as trainer 0 has read it; its error is raised on every trainer."""
        answer = b""
        if self.client.config.rank == 0:
            try:
                found = super()._file_of(path, absent)
                answer = b"" if found is None else _FILE + found
            except CheckpointError as error:  # raised once the others know that there is nothing to load
                answer = _PROBLEM + f"{error}".encode()
        answer = self._own().share(answer)
        if answer[:1] == _PROBLEM:
            raise CheckpointError(answer[1:].decode())
        return answer[1:] if answer else None

    def _read_state(self, dirname: str) -> dict[Any, Any]:
        """Returns the optimizer state of the save; an empty one where it is absent, as is said.

        Raises:
            CheckpointError: it is damaged, or that of other parameters; every trainer raises it.
        """
        path = Path(dirname) / STATE_FILE
        data = self._file_of(path, "the optimizer of the dense parameters starts afresh")
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

    def _use_state(self, state: dict[Any, Any]) -> None:
        """Gives the optimizer a state; its rates stay those of this run."""
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.state.clear()
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})


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
