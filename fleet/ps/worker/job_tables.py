"""JobTables: the tables of a job, which all workers together save, load and shrink."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from fleet.errors import ConfigError, PSError
from fleet.ps.client.client import NothingLoaded
from fleet.ps.wire.messages import DISAGREE, HOW_WISHED, LOAD_WISH
from fleet.ps.worker.meetings import Meetings
from fleet.ps.worker.served_model import Unserved
from fleet.ps.worker.untrained import warn_unlike

BUFFERS = "fleet.buffers"  # a barrier


class JobTables:
    """Files, sizes and the life of rows, over all servers.

    Args:
        meetings: with the other workers.
    """

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings
        self._model = meetings.model
        self._connection = meetings.model.connection
        self._said_unlike = False

    def number(self, table: int | str) -> int:
        """Returns the number of the table of this name or number; raises ConfigError, with all tables, for another."""
        names = {number: config.name for number, config in self._model.plan.configs.items()}
        for number, name in names.items():
            if table == (name if isinstance(table, str) else number) and type(table) in (int, str):
                return number
        raise ConfigError(f"table {table!r} does not exist; the tables are {names!r}.")

    def save(self, dirname: str, mode: int, tables: list[int] | None = None, text: bool = False) -> int:
        """Makes the servers save, once every worker is here with its steps applied; returns the rows saved.

        Every worker calls it, and all return when it is done. Each one requests it, so it is done even if one dies.
        """

        def act(key: str) -> int:
            return self._save(dirname, mode, tables, text, key)

        where = f"{os.path.realpath(dirname)}{_of(tables)}{HOW_WISHED}{mode}{' as text' * text}"
        rows = self._meetings.act_together(f"save to {where}", act)
        if tables is None:
            self._say_unlike()
        return rows

    def _save(self, dirname: str, mode: int, tables: list[int] | None, text: bool, key: str) -> int:
        client = self._connection.client
        self._model.before_save(dirname, tables)
        rows = client.save(dirname, mode=mode, tables=tables, key=key, text=text)
        # The servers hold no buffers; those of worker 0 stand for all.
        if tables is None and not client.config.rank:
            self._model.plan.untrained.write(dirname)
        return rows

    def _say_unlike(self) -> None:
        """Warns on worker 0, once, where the save has its buffers and another worker has other ones."""
        config = self._connection.client.config
        user_call = self._connection.config.user_call
        untrained = self._model.plan.untrained
        names = untrained.names() if config.num_workers > 1 else []
        wish = f"buffers{HOW_WISHED}{untrained.digest():08x}"
        key = self._model.stand(BUFFERS, user_call(), wish) if names else None
        if key is not None and key.startswith(DISAGREE) and not config.rank and not self._said_unlike:
            self._said_unlike = True
            warn_unlike(user_call(), names)

    def load(self, dirname: str, tables: list[int] | None = None) -> None:
        """Makes the servers load a save, once every worker is here; all continue with the loaded parameters.

        Raises:
            CheckpointError: buffers or the state of an optimizer are damaged, or another model's; servers and workers
                are as before.
            NothingLoaded: a server has refused it, or a worker of a hybrid job has left; servers and workers are as
                before.
            PSError: a server failed while it loaded. This worker has the servers' parameters, perhaps only
                in part the save's; the dense ones of a hybrid job are as before.
        """
        unserved: list[Unserved | None] = []

        def act(key: str) -> int:
            unserved.append(self._model.prepare_load(dirname, tables))
            return self._connection.client.load(dirname, tables=tables, key=key)

        self._connection.excuse_writes()  # they are replaced
        try:
            self._meetings.act_together(f"{LOAD_WISH}{os.path.realpath(dirname)}{_of(tables)}", act)
        except PSError as error:
            with suppress(PSError):  # of a server that is gone; the first error says more
                if not isinstance(error, NothingLoaded):
                    self._model.take_loaded()
            raise
        self._model.take_loaded()
        self._model.finish_load(dirname, tables, unserved[0] if unserved else None)

    def mark(self, name: str, keep: int, save: str | None, model: str | None, check: Callable[[], None]) -> None:
        """Makes the servers name their published rows, and save, once every worker is here with its steps applied.

        All return when the folder has the version, and none has taken a step since: it holds each step whole. ``check``
        runs before anything is done, and may raise.
        """

        def act(key: str) -> int:
            check()
            self._connection.client.mark(name, keep, save=save, model=model, key=key)
            # After the mark: a name that is taken must not cost the version that has it its save.
            if save is not None:
                self._save(save, 0, None, False, key)
            return 0

        self._meetings.act_together(f"mark version {name}, keep {keep}, save {save}, model {model}", act)
        if save is not None:
            self._say_unlike()

    def shrink(self, threshold: float | None) -> int:
        """Makes the servers delete rows of the tables that have a criterion, once every worker is here."""
        client = self._connection.client
        parts = self._model.plan.shrinking(threshold)
        rows = 0
        self._meetings.come(f"shrink tables, threshold {threshold}")
        # One worker asks for all: each shrink of a table with an accessor lets its shows and clicks decay.
        if client.config.rank == 0:
            fields = {} if threshold is None else {"threshold": float(threshold)}
            rows = sum(client.alter(part.table_id, "shrink", **fields) for part in parts)
        self._meetings.end()
        return rows

    def set_date(self, table_id: int, day: str) -> None:
        """Advances the day of a table's rows, unless the servers were told the same ``day`` last."""
        client = self._connection.client
        if client.config.rank == 0:
            client.alter(table_id, "advance_day", day=day)

    def facts(self, table_id: int) -> dict[str, int]:
        """Returns rows and bytes of a table over all servers."""
        facts = [fact["tables"][str(table_id)] for fact in self._connection.client.stat()]
        return {name: sum(int(fact[name]) for fact in facts) for name in ("rows", "bytes")}


def _of(tables: list[int] | None) -> str:
    return "" if tables is None else f", tables {tables}"
