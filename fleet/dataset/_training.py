"""train_from_dataset and infer_from_dataset: run the user's step on every batch, with logs, dumps and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fleet._log import LOGGER
from fleet.dataset._batch import Batch
from fleet.dataset._dump import Dump, host_array
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
    optimizer. Meanwhile ``thread_num`` threads read files; the step runs in this thread, because a module and its
    optimizer are not thread-safe.

    ``trainer_desc_configs`` of the strategy in force adds to it: ``dump_fields`` and ``dump_param`` are written to one
    file per worker in ``dump_fields_path``, see :mod:`fleet.dataset._dump`; ``stat_var_names`` are summed over the
    batches and the workers, all of which must then call this.

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
    """A worker without a batch adds zero in the others' shape."""
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
    trainer = session.server_job.trainer if session.server_job is not None else None
    rows = {id(m.weight) for part in trainer.plan.sparse for m in part.modules} if trainer is not None else set()
    served = [name for name, parameter in chosen.items() if id(parameter) in rows]
    if served:
        raise ConfigError(
            f"trainer_desc_configs['dump_param'] names {served[0]!r}, whose rows are on the parameter servers; "
            "fleet.save_persistables() writes them. Name dense parameters."
        )
    return Dump(wanted.dump_fields_path, wanted.dump_fields, chosen, session.job.global_rank)
