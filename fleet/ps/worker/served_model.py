"""ServedModel: the parts of a worker's model outside the sparse tables, as they come from servers and from saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from fleet.ps.worker.connection import WorkerConnection
from fleet.ps.worker.untrained import read_local_file

# The parts of a save that no server holds: buffers and frozen parameters, and the optimizer's state of hybrid jobs.
Unserved: TypeAlias = tuple[dict[str, Tensor], dict[Any, Any]]


class ServedModel:
    """A model whose dense parameters are trained on the servers.

    Args:
        connection: to these servers.
    """

    def __init__(self, connection: WorkerConnection) -> None:
        self.connection = connection
        self.plan = connection.plan

    def begin(self, resumes: bool) -> None:
        """Takes the servers' parameters, and buffers of the save that the servers have loaded, or have written last.

        A worker that ``resumes`` from a checkpoint has its own buffers.
        """
        self._take_parameters(resumes)
        # A worker that resumes reads it, too: in hybrid jobs trainer 0 shares each file that it reads with all others.
        origin = self.connection.client.stat()[0]["origin"]
        unserved: Unserved = self.read(origin) if origin else ({}, {})
        if not resumes:
            self.use(unserved, is_start=True)

    def read(self, dirname: str) -> Unserved:
        """Returns the parts of a save that no server holds.

        Raises:
            CheckpointError: they are damaged, or those of another model.
        """
        return self.plan.untrained.read(dirname, self.read_file), {}

    def read_file(self, path: Path, absent: str) -> bytes | None:
        """Returns the bytes of a file; where it is absent, it says the consequence and returns ``None``."""
        return read_local_file(path, absent, self.connection.client.notify)

    def use(self, unserved: Unserved, is_start: bool = False) -> None:
        """Copies buffers and frozen parameters into the model."""
        self.plan.untrained.assign(unserved[0])

    def stand(self, name: str, call: str, wish: str = "") -> str | None:
        """Stands at a barrier of all workers; returns their common key."""
        return self.connection.client.barrier(name, call, wish)

    def before_save(self, dirname: str, tables: list[int] | None) -> None:
        """Does nothing: the servers have the parameters. Runs before a save, once all workers are here."""

    def prepare_load(self, dirname: str, tables: list[int] | None) -> Unserved | None:
        """Returns :meth:`read`, before any server loads; ``None`` where only ``tables`` are loaded."""
        return self.read(dirname) if tables is None else None

    def take_loaded(self) -> None:
        """Begins to exchange anew from the servers' parameters: all that this worker keeps is from before a load."""
        self._take_parameters()
        self.plan.forget_gradients()
        self.connection.restart()

    def finish_load(self, dirname: str, tables: list[int] | None, unserved: Unserved | None) -> None:
        """Uses what :meth:`prepare_load` has read, or reads it where the others have loaded without this worker."""
        if tables is None:
            self.use(unserved or self.read(dirname))

    def leave(self) -> None:
        """Does nothing: no other worker needs this one after its goodbye to the servers."""

    def release(self) -> None:
        """Does nothing: the model has no other connection."""

    def _take_parameters(self, resumes: bool = False) -> None:
        client = self.connection.client
        if self.plan.dense:
            values = client.wait(client.pull(self.plan.dense_ids, wait_for_others=False))
            for part in self.plan.dense:
                part.assign(values[part.table_id])
            # Whatever differs from these values at the next step was written by the script.
            self.plan.watch.note(values)
