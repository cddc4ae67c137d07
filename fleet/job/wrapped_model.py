"""WrappedModel: the part of a model from ``fleet.distributed_model`` that a job knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from fleet.strategies._gradients.passes import Passes


class WrappedModel(nn.Module):
    """Base of the models that a job trains; FleetModel derives from it.

    Attributes:
        _chain: the module that calls run, with every strategy around the user's.
        _passes: the forwards and backward passes of the chain.
        _redirected: the method that runs inside the wrapped forward now, an empty text while none does.
        runs_micro_batches: whether a call that makes a whole update of micro-batches is under way.
    """

    runs_micro_batches: bool = False

    _chain: nn.Module
    _passes: Passes
    _redirected: str

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        raise NotImplementedError

    def exchanged_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters whose gradients data parallel makes equal on all workers."""
        raise NotImplementedError
