"""Writes one checkpoint to disk, in the foreground or in a thread."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet._log import LOGGER
from fleet.elastic._faults import Faults
from fleet.elastic._folder import Part, prune, publish, worker_part, write_manifest, write_part
from fleet.errors import CheckpointError, FleetError

# Another worker's part must appear within this time; its write began at the same step.
_PEERS_S = 600.0
_VISIBLE_S = 20.0
_POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Write:
    """What this worker contributes to one checkpoint.

    ``files`` holds the contents by name. With ``has_worker_parts`` every worker writes one file into ``staging``, and
    worker 0, which writes the rest and publishes, waits for the records that the others leave beside theirs.
    """

    folder: Path
    staging: Path
    step: int
    rank: int
    world_size: int
    has_worker_parts: bool
    keep: int
    files: Mapping[str, Any]
    values: Mapping[str, Any]
    faults: Faults

    def run(self) -> None:
        """Writes this worker's files; on worker 0 it also publishes the checkpoint. Raises OSError, FleetError."""
        self._meet("save.begin")
        if self.rank == 0:
            try:
                self._write_all()
            except BaseException:
                shutil.rmtree(self.staging, ignore_errors=True)
                raise
        elif self.has_worker_parts:
            self._write_own()

    def _write_all(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.staging.mkdir()
        parts = {name: write_part(self.staging / name, obj, self._meet) for name, obj in self.files.items()}
        if self.has_worker_parts:
            parts |= {worker_part(rank): self._peers_part(rank) for rank in range(1, self.world_size)}
        write_manifest(self.staging, self.values, parts)
        self._meet("save.manifest")
        self._meet("save.rename")
        written = publish(self.staging, self.folder, self.step)
        self._meet("save.renamed")
        prune(self.folder, self.keep, written, self._meet)

    def _write_own(self) -> None:
        deadline = time.monotonic() + _VISIBLE_S
        while not self.staging.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"worker {self.rank} does not see {self.staging.name}, which worker 0 created in "
                    f"{str(self.folder)!r}. "
                    "This strategy keeps a state on each worker, so all of them must share the folder."
                )
            os.listdir(self.folder if self.folder.is_dir() else self.folder.parent)  # refreshes a network file system
            time.sleep(_POLL_S)
        name = worker_part(self.rank)
        try:
            part = write_part(self.staging / name, self.files[name], self._meet)
        except (OSError, FleetError) as error:
            with contextlib.suppress(OSError):
                self._leave_record({"error": f"{error}"})
            raise
        self._leave_record(part.as_json())

    def _leave_record(self, content: Mapping[str, Any]) -> None:
        record = self._record(self.rank)
        temporary = record.with_suffix(".tmp")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        os.rename(temporary, record)

    def _peers_part(self, rank: int) -> Part:
        record = self._record(rank)
        deadline = time.monotonic() + _PEERS_S
        while not record.exists():
            if time.monotonic() > deadline:
                raise CheckpointError(f"worker {rank} has not written its part within {_PEERS_S:.0f} s")
            os.listdir(self.staging)
            time.sleep(_POLL_S)
        content = json.loads(record.read_text(encoding="utf-8"))
        record.unlink()
        if "error" in content:
            raise CheckpointError(f"worker {rank} could not write its part: {content['error']}")
        return Part(content["bytes"], content["sha256"])

    def _record(self, rank: int) -> Path:
        return self.staging / f"{worker_part(rank)}.json"

    def _meet(self, point: str) -> None:
        self.faults.meet(point, self.step)


class Background:
    """At most one write running in a thread, and the error it ended with.

    The thread is not a daemon: a program that exits waits for its last checkpoint.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error = ""

    def start(self, write: Write) -> None:
        """Starts ``write``; the previous one must have finished."""
        self._thread = threading.Thread(target=self._run, args=(write,), name="fleet-checkpoint")
        self._thread.start()

    def finish(self) -> str:
        """Waits for the running write; returns its error, once, or an empty string."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, ""
        return error

    def _run(self, write: Write) -> None:
        self._error = attempt(write)
        if self._error:
            LOGGER.error("The checkpoint of step %d was not written: %s", write.step, self._error)


def attempt(write: Write) -> str:
    """Runs ``write``; returns what went wrong, or an empty string."""
    try:
        write.run()
    except FleetError as error:
        return f"{error}"
    except OSError as error:
        return f"{str(write.folder)!r}: {error.strerror or error}. The checkpoints before it are untouched."
    return ""
