"""SteadyWeights: weights stay as they are in the batches of an update before the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fleet.errors import ConfigError
from fleet.job.logical_workers import LogicalWorkers


class SteadyWeights:
    """Notices parameters that a loop, a model or another optimizer changes once a batch.

    A process makes such a change once for each logical worker that it hosts, so the result depends on the number of
    processes. Writes through ``.data`` leave no trace on a tensor; their values are compared in rounds 1, 2, 4, 8 ...

    Args:
        models: returns the models of the job.
        logical: the logical workers.
    """

    def __init__(self, models: Callable[[], Sequence[nn.Module]], logical: LogicalWorkers) -> None:
        self._models = models
        self._logical = logical
        self._marks: list[tuple[int, int]] = []
        self._norms: list[Tensor] = []
        logical.begins.append(self._note)
        logical.ends.append(self._check)

    def _found(self) -> tuple[list[tuple[int, int]], list[Tensor]]:
        own = [parameter for model in self._models() for parameter in model.parameters()]
        marks = [(tensor._version, tensor.data_ptr()) for tensor in own]
        number = self._logical.round
        looks_closely = number & (number - 1) == 0
        return marks, [_norm(tensor) for tensor in own] if looks_closely else []

    @torch.no_grad()
    def follow(self) -> None:
        """Takes the weights as they are now; called when a model has got parameters."""
        if self._logical.is_amid_update:
            self._marks, self._norms = self._found()

    def note_pass(self) -> None:
        """Called when a backward pass begins: the first forward of a model may have completed it, as asp does."""
        if self._logical.round == 0:
            self.follow()

    def _note(self, rank: int) -> None:
        self._marks = []
        if self._logical.round:
            self.follow()

    @torch.no_grad()
    def _check(self) -> None:
        if not self._logical.is_amid_update:
            return
        marks, norms = self._found()
        if len(marks) != len(self._marks):
            return  # nothing was noted, or the model has got parameters
        changed = [place for place, mark in enumerate(marks) if mark != self._marks[place]]
        changed += [place for place, norm in enumerate(norms) if not _is_equal(norm, self._norms[place])]
        if changed:
            names = [name for model in self._models() for name, _ in model.named_parameters()]
            name = names[changed[0]]
            raise ConfigError(
                f"{name!r} was changed in the batch of logical worker {self._logical.rank}, which completes no "
                "update: by the loop, by the model's forward, or by an optimizer that distributed_optimizer() did not "
                "return. With 'reproducible' a process makes such a change once for each logical worker that it hosts. "
                "Change weights where fleet.update_loss(loss) has returned a number; keep what forward changes in a "
                "buffer."
            )


def _norm(tensor: Tensor) -> Tensor:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    norm: Tensor = torch.linalg.vector_norm(tensor if is_number else tensor.double())
    return norm


def _is_equal(norm: Tensor, other: Tensor) -> bool:
    # The weights of a training that has diverged are nan, and stay as they are.
    return torch.equal(norm, other) or bool(norm.isnan() & other.isnan())
