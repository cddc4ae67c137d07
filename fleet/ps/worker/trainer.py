"""Trainer: a worker's training on parameter servers: it joins, takes steps, goes on after a restart, and leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.autograd.graph import increment_version

from fleet.errors import ConfigError, NanInfError
from fleet.ps.client.shards import Gradient, Rows
from fleet.ps.embeddings.served_embedding import ServedEmbedding
from fleet.ps.table.rules import FLOAT32_MAX, LEARNING_RATE
from fleet.ps.worker.async_exchange import AsyncExchange
from fleet.ps.worker.exchange_modes import SyncExchange
from fleet.ps.worker.job_tables import JobTables
from fleet.ps.worker.joining import give_initial_values, rejoin, wait_for_values
from fleet.ps.worker.meetings import Meetings
from fleet.ps.worker.served_model import ServedModel

# Names of barriers, see fleet.ps.worker.meetings.
START = "fleet.start"
READY = "fleet.ready"


class Trainer:
    """Trains a model whose rows, and by default dense parameters, are on the servers.

    Args:
        model: knows the connection to the servers, which is not open yet.

    Attributes:
        connection: the client, the exchange, and the lookups.
        meetings: barriers of all workers.
        tables: saves and loads, and the life of rows.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.connection = model.connection
        self.plan = model.plan
        self.meetings = Meetings(model)
        self.tables = JobTables(self.meetings)
        self._weights = [module.weight for module in self.plan.modules if isinstance(module, ServedEmbedding)]
        self._config = self.connection.config
        self._pending: Mapping[str, Any] | None = None
        self._rates: dict[int, float] = {}  # those that this process has sent, by table

    # -- start and end -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connects, agrees on the tables, and starts from the servers' parameters.

        Worker 0 gives the servers the parameters of its model, unless they have some already: from a checkpoint, or
        because this worker was restarted.
        """
        config = self._config
        client = self.connection.open()
        if client.config.rank == 0:
            give_initial_values(client, self.plan, self.connection.connect)
            if not client.step:  # nobody trained yet; a restarted worker 0 has yet to resume its schedule
                self._send_rates()
        if config.launch_barrier or not self.plan.dense:
            client.barrier(START, config.user_call())
        wait_for_values(client, self.plan)  # the barrier does not wait for a worker 0 whose lease has ended
        self.model.begin(resumes=self._pending is not None)
        if config.launch_barrier:
            client.barrier(READY, config.user_call())  # nobody trains before all have the same parameters
        rejoin(client, self._pending)  # after the barriers of the start, which a restarted worker passes again
        self.connection.start()
        self.drop_gradients()

    def close(self) -> None:
        """Sends what waits, says goodbye to the servers, and disconnects."""
        connection = self.connection
        try:
            connection.flush()
            connection.stop()
            connection.client.goodbye()
            self.model.leave()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Disconnects without a goodbye: the servers wait for a restart of this worker until its lease ends."""
        self.connection.abandon()
        self.model.release()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state with which a restarted worker repeats no step."""
        connection = self.connection
        if connection.opened is None:
            return dict(self._pending or {})
        if connection.exchange is not None:
            connection.flush()  # steps in a queue would be lost with this process
        return connection.opened.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a checkpoint: the servers skip the steps that they have had from this worker."""
        if self.connection.opened is None:
            self._pending = dict(state)
        else:
            rejoin(self.connection.opened, state)

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Sends the gradients that backward left to the servers, and takes parameters from them.

        Raises:
            NanInfError: a gradient is not finite and the check is on; nothing was pushed.
            PSError: a server is lost for longer than the deadline.
        """
        connection = self.connection
        exchange = connection.running()
        exchange.check(is_step=True)
        # Copying the dense gradients takes time, and some exchanges read them in place.
        reads_dense = self._config.check_finite or not exchange.reads_grad
        gradients = self.plan.gather_gradients(connection.exchanged.dense if reads_dense else ())
        if self._config.check_finite:
            self._check_finite(gradients)
        self._send_rates()
        increment_version(self._weights)  # a graph that has read them is from before this step
        streams = connection.streams
        if streams is None:
            exchange.put(gradients)
        elif connection.lost_ranks is not None and connection.lost_ranks.current is not None:
            connection.lost_ranks.current.put(gradients)
        else:
            streams.put(exchange, connection.client, gradients)

    def is_stepping(self) -> bool:
        """Returns whether the trainer steps the user's optimizer outside a step of the script."""
        return False

    def has_gradients(self) -> bool:
        """Returns whether rows have gradients that were not pushed."""
        return any(m.lookup.has_gradients() or m.weight.grad is not None for m in self.plan.modules)

    def drop_gradients(self) -> None:
        """Forgets the gradients of rows."""
        for module in self.plan.modules:
            module.forget_gradients()

    def non_finite_rows(self) -> str:
        """Returns a sentence that names the first row with a NaN or Inf in its gradient; forgets the gradients."""
        return self.plan.not_finite(self.plan.gather_gradients(self.connection.exchanged.dense))

    def _check_finite(self, gradients: Mapping[int, Gradient | Rows]) -> None:
        client = self.connection.client
        rank = client.config.rank
        step = client.step + 1
        found = self.plan.not_finite(gradients)
        if found:
            raise NanInfError(
                f"FLAGS_check_nan_inf: worker {rank}, step {step}: {found} Nothing was pushed.", rank=rank, step=step
            )

    def _send_rates(self) -> None:
        """Tells the servers when a scheduler has changed a rate; worker 0's schedule counts.

        Raises:
            ConfigError: a rate is negative or not finite.
        """
        # In geo mode no part has a rate: servers add the differences that workers send.
        rates = [(part, part.rate()) for part in self.plan.parts]
        changed = {p.table_id: rate for p, rate in rates if rate is not None and rate != self._rates.get(p.table_id)}
        if not changed:
            return
        for part, rate in rates:
            if rate is not None and not 0 <= rate <= FLOAT32_MAX:
                raise ConfigError(
                    f"the learning rate of {part.config.name!r} is {rate}; it must be finite in float32 and not "
                    "negative. Look at the scheduler, or at what sets group['lr']."
                )
        client = self.connection.client
        exchange = self.connection.exchange
        if isinstance(exchange, AsyncExchange):
            exchange.meeting()  # the servers apply what waits with the rate that it was computed for
            if self.connection.lost_ranks is not None:
                self.connection.lost_ranks.flush()
        elif isinstance(exchange, SyncExchange) and not client.config.rank:
            exchange.settle()  # a server without a share in this step may wait for the previous one
        for table_id, rate in changed.items() if not client.config.rank else ():
            client.alter(table_id, LEARNING_RATE, value=rate)
        self._rates.update(changed)
