"""HybridTrainer: a worker with its rows on the servers and its own dense parameters, equal on all trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.autograd.graph import increment_version

from fleet.errors import NanInfError
from fleet.ps.client.shards import Gradient, Rows
from fleet.ps.worker.dense_exchange import DenseExchange, check_same_round, not_finite
from fleet.ps.worker.hybrid_model import HybridModel
from fleet.ps.worker.trainer import Trainer


class HybridTrainer(Trainer):
    """Averages dense gradients over the trainers, steps the user's optimizer here, and hands rows to the servers.

    The mode of its connection is sync or async.
    """

    model: HybridModel

    # -- start and end -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connects; afterwards every trainer has trainer 0's parameters and buffers.

        Trainer 0 starts from the servers' copy, if they have one from a save, or from its own parameters if it was
        given a checkpoint.

        Raises:
            PSError: the trainers were given checkpoints of different steps.
        """
        super().open()
        dense = self.model.own()
        client = self.connection.client
        dense.copy_from_0(self.model.tensors)
        found = dense.gather([dense.rounds, client.step])  # by rank
        check_same_round([rounds for rounds, _ in found])
        # Without checkpoints: the servers may have one step more from one trainer than from another.
        if client.staleness is not None:
            client.step = max(step for _, step in found)

    # -- training ------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Averages the dense gradients over the trainers and steps with them; sends those of rows to the servers.

        Raises:
            NanInfError: a gradient of this trainer or another is not finite and the check is on; nothing was updated.
            PSError: a server is lost for longer than the deadline, or a trainer is gone.
        """
        exchange = self.connection.running()
        gradients = self.plan.gather_gradients(self.plan.dense if self._config.check_finite else ())
        dense = self.model.own()
        self._average(gradients, dense)
        # Gradients of rows leave once every trainer has computed with the old rows: a trainer that repeats a step after
        # a failure then computes with the same rows, although the servers may hold a gradient of that step already.
        self._send_rates()
        increment_version(self._weights)
        exchange.put({table_id: rows for table_id, rows in gradients.items() if isinstance(rows, Gradient)})
        dense.step()

    def is_stepping(self) -> bool:
        """Returns whether the trainer steps the user's optimizer at this moment, also for the steps of others."""
        return self.model.dense is not None and self.model.dense.is_stepping

    def non_finite_rows(self) -> str:
        """Names a bad row, for a check that makes this trainer raise instead of stepping; the others raise as well."""
        found = super().non_finite_rows()
        dense = self.model.own()
        dense.start(bad=True)
        dense.finish()
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a restarted worker needs, and the number of its updates."""
        state = super().state_dict()
        dense = self.model.dense
        return state if dense is None or self.connection.opened is None else {**state, "rounds": dense.rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a checkpoint; all trainers load checkpoints of the same step."""
        super().load_state_dict(state)
        self.model.own().rounds = int(state.get("rounds", 0))

    def _average(self, gradients: Mapping[int, Gradient | Rows], dense: DenseExchange) -> None:
        """Replaces the dense gradients with their mean over the trainers; raises on all when one has a bad gradient."""
        if self._config.check_finite:
            try:
                self._check_finite(gradients)
            except NanInfError:
                dense.start(bad=True)
                dense.finish()
                raise
        dense.start()
        bad = dense.finish().bad
        if bad:
            raise not_finite(self.connection.client.config.rank, bad)
