"""``fleet.save_inference_model``: writes the tables, the model's state, and a program where inputs are given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fleet.checkpoint import save_load
from fleet.errors import ConfigError
from fleet.features.transforms import FILE, Transforms
from fleet.ps.worker.job_tables import JobTables

STATE = "model.pt"


def save_model(
    tables: JobTables,
    model: nn.Module,
    folder: str,
    mode: int,
    example_inputs: Sequence[Any] | None,
    transforms: Transforms | None,
    *,
    first: bool,
) -> None:
    """Makes the servers save, and writes the rest where this worker is the ``first``; every worker calls it.

    Raises:
        ConfigError: the model cannot be exported with these example inputs; nothing was saved.
    """
    if transforms is not None and not isinstance(transforms, Transforms):
        raise ConfigError(
            f"save_inference_model(transforms={transforms!r:.80}): it is a fleet.features.Transforms, or None."
        )
    if example_inputs is not None:
        from fleet.ps.serving.export import export, traced

        traced(model, example_inputs)  # before the servers save: what is refused must leave the folder as it was
    tables.save(folder, mode)
    state = model.state_dict()
    if first:
        save_load.save(state, os.path.join(folder, STATE))
        if transforms is not None:
            transforms.save(folder)
        else:
            Path(folder, FILE).unlink(missing_ok=True)  # of an earlier save: a service would apply them to this model
        if example_inputs is not None:
            export(model, example_inputs, folder)
