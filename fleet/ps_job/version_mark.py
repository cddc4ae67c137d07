"""``fleet.mark_version``: names the published rows, after a save of the tables where one is asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.errors import ConfigError
from fleet.ps.publishing.versions import EXPORT, check_keep, check_name, program_folders

if TYPE_CHECKING:
    from fleet.ps_job.server_job import ServerJob


def mark_version(job: ServerJob, name: object, keep: object, save: object, model: object) -> None:
    """Names the rows on all servers; every worker calls it. See ``fleet.mark_version``.

    Raises:
        ConfigError: rows are not published to a folder, or an argument is wrong; nothing was saved or marked.
        PSError: a server refuses it.
    """
    tables = job.running().tables
    checked = check_name(name)
    count = check_keep(keep)
    folder = _folder("save", save)
    programs = _folder("model", model)
    if job.publication is None:
        raise ConfigError(
            f"fleet.mark_version({name!r}) names published rows, and this job publishes none. Call "
            'fleet.ps.publish("rows") on every role, before the servers start.'
        )
    job.publication.check_versions()

    def check() -> None:  # once all workers are here: worker 0 may be writing the program until it comes
        if programs is not None and not program_folders(Path(programs)):
            raise ConfigError(
                f"fleet.mark_version({name!r}, model={model!r}): there is no exported program ({EXPORT}), nor in a "
                "folder of it. Write one with fleet.ps.export or fleet.save_inference_model(example_inputs=...)."
            )

    tables.mark(checked, count, folder, programs, check)


def _folder(kind: str, path: object) -> str | None:
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not os.fspath(path) or os.path.isfile(path):
        raise ConfigError(f"fleet.mark_version({kind}={path!r}) takes the path of a folder, or None.")
    return os.path.abspath(os.fspath(path))
