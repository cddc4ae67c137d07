"""Dump: what ``trainer_desc_configs`` makes train_from_dataset write, and the values it sums.

The file ``part-RANK`` in ``dump_fields_path`` gets one line for each sample, ``ID<tab>CONTENT<tab>FIELD:COUNT:V:V...``
with one part per field, and one line ``(BATCH,NAME):V:V...`` for each batch and parameter. Numbers have nine digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from fleet.dataset._batch import Batch
from fleet.errors import ConfigError


class Dump(AbstractContextManager["Dump"]):
    """Writes fields and parameters batch by batch; ends with the ``with`` block.

    Args:
        folder: where the file goes; created if absent.
        fields: outputs of the step, or slots.
        parameters: the parameters to write, by name.
        rank: number in the file name.

    Raises:
        ConfigError: there is something to write and no folder, or a folder and nothing to write.
    """

    def __init__(self, folder: str, fields: Sequence[str], parameters: Mapping[str, torch.Tensor], rank: int) -> None:
        named = bool(fields) or bool(parameters)
        if named != bool(folder):
            raise ConfigError(
                f"trainer_desc_configs has dump_fields_path={folder!r}, dump_fields={list(fields)!r} and "
                f"dump_param={list(parameters)!r}; a folder needs something to write, and vice versa."
            )
        self._fields, self._parameters = list(fields), dict(parameters)
        self._file: IO[str] | None = None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._file = open(Path(folder) / f"part-{rank:03d}", "w", encoding="utf-8")  # noqa: SIM115

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, number: int, batch: Batch, outputs: Mapping[str, Any]) -> None:
        """Writes the samples of batch ``number`` and the parameters after it.

        Raises:
            ConfigError: a field is neither an output nor a slot, or has no row for each sample.
        """
        if self._file is None:
            return
        columns = [(field, _rows(field, batch, outputs)) for field in self._fields]
        for index in range(batch.num_samples if columns else 0):
            parts = [batch.ins_ids[index] if batch.ins_ids else "", batch.contents[index] if batch.contents else ""]
            parts += [f"{field}:{len(rows[index])}{_shown(rows[index])}" for field, rows in columns]
            self._file.write("\t".join(parts) + "\n")
        for name, parameter in self._parameters.items():
            self._file.write(f"({number},{name}){_shown(parameter.detach().cpu().flatten().tolist())}\n")


def _rows(field: str, batch: Batch, outputs: Mapping[str, Any]) -> list[list[float]]:
    """Returns the values of a field for each sample."""
    if field not in outputs and field not in batch:
        raise ConfigError(
            f"dump_fields names {field!r}; the step returns {sorted(outputs)} and the slots are {sorted(batch)}."
        )
    value = outputs[field] if field in outputs else batch[field]
    if isinstance(value, tuple):
        values, ends = value[0].tolist(), value[1].tolist()
        rows = [values[start:stop] for start, stop in zip(ends, ends[1:], strict=False)]
    else:
        array = host_array(field, value)
        rows = array.reshape(len(array), -1).tolist() if array.ndim else []
    if len(rows) != batch.num_samples:
        raise ConfigError(
            f"dump_fields names {field!r}, which has {len(rows)} rows in a batch of {batch.num_samples} samples; it "
            "needs one row per sample."
        )
    return rows


def host_array(name: str, value: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns a number, tensor or array of numbers as an array; raises ConfigError for anything else."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype in (torch.bfloat16, torch.float16) else value.numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ConfigError(
            f"the step returns {name!r} as {type(value).__name__}; outputs are numbers, tensors or arrays."
        )
    return array


def _shown(values: Sequence[float]) -> str:
    return "".join(f":{value:.9g}" if isinstance(value, float) else f":{int(value)}" for value in values)
