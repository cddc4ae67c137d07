"""ServerCalls: the public calls of Fleet that belong to parameter-server jobs; Fleet inherits them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fleet._checkpoint import save
from fleet.errors import ConfigError, OptionWarning

if TYPE_CHECKING:
    from fleet._server_job import ServerJob
    from fleet._session import Session

Path = str | os.PathLike[str]


class ServerCalls:
    """Expects what Fleet has: the session and its roles."""

    if TYPE_CHECKING:

        def _need(self, call: str) -> Session: ...
        def is_worker(self) -> bool: ...  # noqa: D102
        def is_server(self) -> bool: ...  # noqa: D102
        def is_first_worker(self) -> bool: ...  # noqa: D102

    # ---- servers -------------------------------------------------------------------------------------------------

    def init_server(self, dirname: Path | None = None, var_names: Sequence[str] | None = None) -> None:
        """Prepares this parameter server, with the rows and parameters of an earlier save where ``dirname`` is given.

        Args:
            dirname: a folder that ``save_persistables`` wrote, by any number of servers.
            var_names: loads only these sparse tables; their names are those of the model's embeddings.

        Raises:
            NotInitializedError: before ``fleet.init``, or ``dirname`` is given and the model is not known yet.
            ConfigError: ``dirname`` is no folder, or a name is not that of a sparse table.
        """
        job = self._job("init_server", "server")
        if job is not None:
            job.init_server(None if dirname is None else _path("init_server", "dirname", dirname), var_names)

    def run_server(self) -> None:
        """Serves, and returns when every worker has called ``stop_worker`` (or has been silent too long)."""
        job = self._job("run_server", "server")
        if job is not None:
            job.run_server()

    # ---- workers -------------------------------------------------------------------------------------------------

    def init_worker(self, scopes: object = None) -> None:
        """Connects this worker to the servers; training starts from worker 0's parameters, or the servers' own.

        It waits for servers that are not there yet and says which, for at most FLAGS_stop_check_timeout seconds. A
        single process without servers in its environment gets one inside itself.

        Args:
            scopes: accepted for Fleet's signature; torch has no scopes.

        Raises:
            NotInitializedError: before ``fleet.init``, ``distributed_optimizer`` or ``distributed_model``.
            ConfigError: the model cannot be served.
            PSError: servers did not come in time; the message names them.
        """
        job = self._job("init_worker", "worker")
        if job is not None:
            job.start_worker()

    def stop_worker(self) -> None:
        """Sends what is still waiting and leaves the job; the servers end when all workers have left."""
        job = self._job("stop_worker", "worker")
        if job is not None:
            job.stop_worker()

    # ---- files ---------------------------------------------------------------------------------------------------

    def save_persistables(
        self,
        executor: object = None,
        dirname: Path | None = None,
        main_program: object = None,
        mode: int = 0,
        *,
        text: bool = False,
    ) -> None:
        """Makes the servers write all tables to ``dirname``; every worker calls it and returns when it is written.

        Args:
            executor: accepted for Fleet's signature; the folder may stand in its place.
            dirname: a folder that all servers reach.
            main_program: accepted for Fleet's signature.
            mode: 0 every row; 1 the rows that changed enough since the last save; 2 the rows with a score high
                enough; 3 every row, and a day passes. 1 and 2 need an accessor on each table.
            text: writes rows as lines of text, which other programs read and ``load_model`` too; with mode 0.
        """
        folder, number = _folder("save_persistables", executor, dirname), _check_mode(mode)
        if not isinstance(text, bool) or (text and number):
            raise ConfigError(
                f"fleet.save_persistables(mode={mode!r}, text={text!r}): text is True or False, and True writes every "
                "row: mode 0."
            )
        job = self._job("save_persistables", "worker")
        if job is not None:
            job.running().save(folder, number, text=text)

    def save_inference_model(
        self,
        executor: object = None,
        dirname: Path | None = None,
        feeded_var_names: object = None,
        target_vars: object = None,
        main_program: object = None,
        export_for_deployment: bool = True,
        mode: int = 0,
    ) -> None:
        """Writes what one process needs to predict: all tables, and the model's state as ``model.pt``.

        Every worker calls it; worker 0 writes the state. To predict, build the model, load the state with
        ``fleet.load`` and call ``SparseEmbedding.load(dirname)`` on each embedding of unbounded ids.

        Args:
            executor: accepted for Fleet's signature; the folder may stand in its place.
            dirname: a folder that all servers reach.
            feeded_var_names, target_vars, main_program, export_for_deployment: accepted for Fleet's signature; the
                model is the module that was given to ``distributed_model``.
            mode: as in :meth:`save_persistables`.
        """
        folder, number = _folder("save_inference_model", executor, dirname), _check_mode(mode)
        job = self._job("save_inference_model", "worker")
        if job is None:
            return
        job.running().save(folder, number)
        model = self._need("save_inference_model").models[0]
        state = model.state_dict()
        if self.is_first_worker():
            save(state, os.path.join(folder, "model.pt"))

    def save_one_table(self, table_id: int, path: Path, mode: int = 0) -> None:
        """Makes the servers write one table, by its number, as :meth:`save_persistables` does."""
        folder, number = _path("save_one_table", "path", path), _check_mode(mode)
        job = self._job("save_one_table", "worker")
        if job is not None:
            trainer = job.running()
            trainer.save(folder, number, [_table(trainer.plan.configs, table_id)])

    def load_model(self, path: Path, mode: int = 0) -> None:
        """Makes the servers read all tables from a save; every worker calls it and goes on with what was read.

        Args:
            path: a folder that ``save_persistables`` wrote.
            mode: accepted; a save says itself what it holds.
        """
        folder = _path("load_model", "path", path)
        _check_mode(mode)
        job = self._job("load_model", "worker")
        if job is not None:
            job.running().load(folder)

    def load_one_table(self, table_id: int, path: Path, mode: int = 0) -> None:
        """Makes the servers read one table, by its number, as :meth:`load_model` does."""
        folder = _path("load_one_table", "path", path)
        _check_mode(mode)
        job = self._job("load_one_table", "worker")
        if job is not None:
            trainer = job.running()
            trainer.load(folder, [_table(trainer.plan.configs, table_id)])

    # ---- the life of rows ----------------------------------------------------------------------------------------

    def shrink(self, threshold: float | None = None) -> int:
        """Deletes rows that are not worth keeping; every worker calls it. Worker 0 gets the number of rows deleted.

        Args:
            threshold: the least score of a row that stays (of tables without accessor: the least number of pushes);
                ``None`` takes ``delete_threshold`` and ``delete_after_unseen_days`` of each table's accessor, and
                leaves tables without one alone. The rows of ``nn.Embedding`` stay unless their table has an accessor.

        Raises:
            ConfigError: no table has rows to delete in this way; said on every worker, and nothing is deleted.
        """
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if threshold is not None and not (number and math.isfinite(threshold) and threshold >= 0):
            raise ConfigError(
                f"fleet.shrink(threshold={threshold!r}) takes a number of 0 or more, the least score of a row that "
                "stays, or None for the settings of each table."
            )
        job = self._job("shrink", "worker")
        return 0 if job is None else job.running().shrink(threshold)

    def print_table_stat(self, table_id: int, pass_id: int = 0, threshold: float = 0.0) -> None:
        """Prints how many rows and bytes a table has on all servers together.

        Args:
            table_id: number of the table.
            pass_id: a number that stands in the line.
            threshold: refused above 0: servers do not count rows by their score.
        """
        if isinstance(pass_id, bool) or not isinstance(pass_id, int):
            raise ConfigError(f"print_table_stat(pass_id={pass_id!r}) takes a whole number, for the line.")
        if threshold:
            raise ConfigError(
                f"print_table_stat(threshold={threshold!r}): rows are counted without a threshold; use 0."
            )
        job = self._job("print_table_stat", "worker")
        if job is not None:
            trainer = job.running()
            facts = trainer.table_facts(_table(trainer.plan.configs, table_id))
            print(f"pass {pass_id}, table {table_id}: {facts['rows']} rows, {facts['bytes']} bytes", flush=True)

    def set_date(self, table_id: int, day_id: str | int) -> None:
        """Lets a day pass for the rows of a table, for tables that forget rows unseen for long; worker 0 triggers it.

        Args:
            table_id: number of the table.
            day_id: the new day. One that the servers have been told last changes nothing, so that a worker 0 which is
                started again may repeat its call.
        """
        if isinstance(day_id, bool) or not isinstance(day_id, str | int) or not str(day_id).strip():
            raise ConfigError(f"fleet.set_date(day_id={day_id!r}) takes the day as text or number, such as '20260131'.")
        job = self._job("set_date", "worker")
        if job is not None:
            trainer = job.running()
            trainer.set_date(_table(trainer.plan.configs, table_id), str(day_id))

    # ---- inside --------------------------------------------------------------------------------------------------

    def _job(self, call: str, role: str) -> ServerJob | None:
        """Returns this process's job; ``None`` with a warning where the call has nothing to act on."""
        session = self._need(call)
        job = session.server_job
        if job is None:
            warnings.warn(
                f"fleet.{call}() changes nothing: this job has no parameter servers. They come with "
                "fleet.init(is_collective=False) and PADDLE_PSERVERS_IP_PORT_LIST, or --server_num of the launcher.",
                OptionWarning,
                stacklevel=3,
            )
            return None
        own = "server" if self.is_server() else "worker"
        if own != role:
            raise ConfigError(f"fleet.{call}() is for {role}s; this process is a {own}. Ask fleet.is_{role}() first.")
        return job


def _folder(call: str, executor: object, dirname: Path | None) -> str:
    """Returns the folder, which may stand where Fleet's signature has the executor."""
    return _path(call, "dirname", dirname if dirname is not None else executor)


def _path(call: str, name: str, value: object) -> str:
    """Returns the folder ``value`` as an absolute path; raises ConfigError when it cannot be one."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"fleet.{call}({name}={value!r}) takes the path of a folder, as text or pathlib.Path.")
    if os.path.isfile(text):
        raise ConfigError(f"fleet.{call}({name}={value!r}) takes the path of a folder, and this is a file.")
    return os.path.abspath(text)


def _table(known: Any, table_id: int) -> int:
    if isinstance(table_id, bool) or not isinstance(table_id, int) or table_id not in known:
        names = {key: config.name for key, config in known.items()}
        raise ConfigError(f"table {table_id!r} does not exist; the tables are {names!r}.")
    return table_id


def _check_mode(mode: object) -> int:
    """Returns ``mode``; raises ConfigError unless it is 0 to 3."""
    if isinstance(mode, bool) or not isinstance(mode, int) or not 0 <= mode <= 3:
        raise ConfigError(
            f"mode is {mode!r}; it is 0 (every row), 1 (rows that changed), 2 (rows worth serving) or 3 (every row, "
            "and a day passes)."
        )
    return mode
