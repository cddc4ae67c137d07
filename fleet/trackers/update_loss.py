"""fleet.update_loss: the loss of a whole update, where a loop has the losses of its batches."""

from __future__ import annotations

from typing import Any

from fleet.errors import ConfigError
from fleet.job.running import running_job
from fleet.trackers.run_log import RunLog
from fleet.trackers.value_means import as_numbers

__all__ = ["update_loss"]


def update_loss(loss: Any) -> float | None:
    """Returns the mean of ``loss`` over all batches of an update; ``None`` after a batch that does not complete it.

    Every worker calls it once for each batch. With ``strategy.reproducible`` the number has the same bits on any number
    of workers, and it is ``None`` in the turns before the last one: what belongs to an update, as an average of the
    weights, stands under ``if value is not None``. Without it every batch has a number, the mean over the workers.

    Args:
        loss: the loss of this batch, a number or a tensor of one element.

    Raises:
        ConfigError: ``loss`` is no number, some batches of an update were left out, or a reproducible job has no batch.
        RendezvousError: a worker does not make the call.

    Example:
        >>> fleet.update_loss(torch.tensor(0.5))
        0.5
    """
    values = as_numbers({"loss": loss}, "fleet.update_loss()")
    job = running_job()
    if job is None:
        return values["loss"]
    if job.logical is not None and not job.logical.is_open:
        raise ConfigError(
            "fleet.update_loss() was called between two updates. With 'reproducible' it takes the loss of each batch, "
            "inside the loop over sampler.batches(loader) or fleet.elastic.logical_ranks(); a value that is no batch's "
            "goes to fleet.log()."
        )
    means = job.listeners.get(RunLog).means_of("fleet.update_loss()", values)
    return None if means is None else means["loss"]
