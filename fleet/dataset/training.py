"""train_from_dataset and infer_from_dataset: run the user's step on every batch, with logs, dumps and sums.

A dump is the file ``part-RANK`` in ``dump_fields_path``. It gets one line for each sample,
``ID<tab>CONTENT<tab>FIELD:COUNT:V:V...`` with one part per field, and one line ``(BATCH,NAME):V:V...`` for each batch
and parameter. Numbers have nine digits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from fleet.common.log import LOGGER
from fleet.common.plain_files import open_own
from fleet.dataset.batch import Batch
from fleet.errors import ConfigError
from fleet.job.running import running_session

if TYPE_CHECKING:
    from fleet.job.session import Session

Step = Callable[[Batch], Mapping[str, Any] | None]


def train_from_dataset(
    step: Step, dataset: Iterable[Batch], *, fetch_list: Sequence[str] = (), print_period: int = 100
) -> dict[str, Any]:
    """Calls ``step`` with every batch of ``dataset``, once, and returns the sums of ``stat_var_names``.

    The torch form of ``Executor.train_from_dataset``: the step computes the loss, calls ``backward`` and steps the
    optimizer. It runs in this thread, because a module and its optimizer are not thread-safe, while ``thread_num``
    threads read files.

    ``trainer_desc_configs`` of the strategy in force adds to it: ``dump_fields`` and ``dump_param`` are written to one
    file per worker in ``dump_fields_path``, see :mod:`fleet.dataset.training`; ``stat_var_names`` are summed over the
    batches and the workers, so every worker must call this.

    Args:
        step: takes a :class:`Batch`, returns named outputs (numbers or tensors) or ``None``.
        dataset: yields the batches.
        fetch_list: outputs to log every ``print_period`` batches: numbers directly, tensors as their mean.
        print_period: batches between log lines.

    Returns:
        ``stat_var_names`` with their sums, float64 arrays in the shape of the outputs.

    Raises:
        ConfigError: a name that the step does not return, or inconsistent dump options.

    Example:
        >>> slots = [fleet.dataset.Slot("x", (-1, 4), "float32")]
        >>> with open("part-0", "w") as file:
        ...     _ = file.write("4 1 2 3 4\\n4 5 6 7 8\\n")
        >>> dataset = fleet.QueueDataset()
        >>> dataset.init(use_var=slots, batch_size=2)
        >>> dataset.set_filelist(["part-0"])
        >>> def step(batch):
        ...     loss = model(batch["x"]).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.clear_grad()
        ...     return {"loss": loss}
        >>> fleet.train_from_dataset(step, dataset, fetch_list=["loss"])
        {}
    """
    return _run(step, dataset, fetch_list, print_period, "train_from_dataset")


def infer_from_dataset(
    step: Step, dataset: Iterable[Batch], *, fetch_list: Sequence[str] = (), print_period: int = 100
) -> dict[str, Any]:
    """The same as :func:`train_from_dataset` without gradients: ``step`` runs under ``torch.no_grad``.

    The step decides whether the model is in evaluation mode.
    """
    with torch.no_grad():
        return _run(step, dataset, fetch_list, print_period, "infer_from_dataset")


def _run(step: Step, dataset: Iterable[Batch], fetch: Sequence[str], period: int, call: str) -> dict[str, Any]:
    if not callable(step):
        raise ConfigError(f"{call}({step!r}, ...): the step is a function that takes a batch.")
    if type(period) is not int or period < 1:
        raise ConfigError(f"{call}(print_period={period!r}) takes an integer of at least 1.")
    if isinstance(fetch, str):
        raise ConfigError(f"{call}(fetch_list={fetch!r}) takes a list of names.")
    session = running_session()
    stats: list[str] = list(session.options["trainer_desc_configs"].stat_var_names) if session else []
    sums: dict[str, Any] = {}
    with _dump_of(session) as dump:
        for number, batch in enumerate(dataset):
            outputs = _checked(step(batch), [*fetch, *stats], call)
            dump.write(number, batch, outputs)
            # In float64: sums over millions of batches would stop growing in float32.
            for name in stats:
                sums[name] = sums.get(name, 0.0) + host_array(name, outputs[name]).astype("float64")
            if fetch and (number + 1) % period == 0:
                shown = [f"{name}={host_array(name, outputs[name]).mean():.6g}" for name in fetch]
                LOGGER.info("batch %d: %s", number + 1, ", ".join(shown))
    if session is None or not stats:
        return sums
    return {name: session.job.util.all_reduce(_agreed(sums.get(name), session)) for name in stats}


def _checked(outputs: Mapping[str, Any] | None, names: Sequence[str], call: str) -> Mapping[str, Any]:
    outputs = {} if outputs is None else outputs
    if not isinstance(outputs, Mapping):
        raise ConfigError(f"{call}: the step returned {type(outputs).__name__}; it must return a dictionary or None.")
    missing = [name for name in names if name not in outputs]
    if missing:
        raise ConfigError(f"{call}: the step returns {sorted(outputs)}, and {missing[0]!r} is requested.")
    return outputs


def _agreed(value: Any, session: Session) -> Any:
    """Returns ``value``; on a worker without a batch, zeros in the shape of the others."""
    # A sum needs one shape everywhere, and a worker without a batch has never seen it.
    shape = np.full(9, -1, np.int64)
    if value is not None:
        shape[0] = np.ndim(value)
        shape[1 : 1 + np.ndim(value)] = np.shape(value)
    known = np.asarray(session.job.util.all_reduce(shape, "max"))
    return value if value is not None else np.zeros(tuple(known[1 : 1 + max(int(known[0]), 0)]))


def _dump_of(session: Session | None) -> Dump:
    if session is None:
        return Dump("", [], {}, 0)
    wanted = session.options["trainer_desc_configs"]
    parameters = {name: parameter for parameter, name in session.job.parameter_names().items()}
    unknown = [name for name in wanted.dump_param if name not in parameters]
    if unknown:
        raise ConfigError(
            f"trainer_desc_configs['dump_param'] names {unknown[0]!r}; the parameters are {sorted(parameters)}."
        )
    chosen = {name: parameters[name] for name in wanted.dump_param}
    # The weight of a served embedding is no whole tensor here: its rows come and go with the lookups.
    trainer = session.server_job.trainer if session.server_job is not None else None
    rows = {id(m.weight) for m in trainer.plan.modules} if trainer is not None else set()
    served = [name for name, parameter in chosen.items() if id(parameter) in rows]
    if served:
        raise ConfigError(
            f"trainer_desc_configs['dump_param'] names {served[0]!r}, whose rows are on the parameter servers; "
            "fleet.save_persistables() writes them. Name dense parameters."
        )
    return Dump(wanted.dump_fields_path, wanted.dump_fields, chosen, session.job.global_rank)


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
        self._fields = list(fields)
        self._parameters = dict(parameters)
        self._file: IO[str] | None = None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            descriptor = open_own(Path(folder) / f"part-{rank:03d}", os.O_WRONLY | os.O_TRUNC)
            self._file = open(descriptor, "w", encoding="utf-8")  # noqa: SIM115

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
        values = value[0].tolist()
        rows = [values[start:stop] for start, stop in pairwise(value[1].tolist())]
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
