"""The wrapper of a model whose backward exchanges gradients, in stages 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fleet.common.outside_graphs import outside_graphs
from fleet.strategies._gradients.flat import broadcast_from_rank_0


class ExchangingModule(nn.Module):
    """Says when gradients are exchanged, and gives all workers rank 0's buffers.

    Attributes:
        exchanges: whether the next backward pass exchanges gradients.
        held: True inside ``no_sync()``, and while ``require_backward_grad_sync`` is False.
        process_group: the workers that train copies of the model.
    """

    def __init__(self, module: nn.Module, process_group: Any) -> None:
        super().__init__()
        self.module = module
        self.exchanges = True
        self.held = False
        self.process_group = process_group

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward may exchange gradients; assigning False is an open-ended ``no_sync()``."""
        return not self.held

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.held = not value
        self.set_exchanges(value)

    def set_exchanges(self, exchanges: bool) -> None:
        """Sets whether backward exchanges gradients, or leaves them to a later backward."""
        self.exchanges = exchanges

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which backward leaves gradients local, to be exchanged by a later backward."""
        # Both are kept, for contexts may be nested and the flag may have been assigned.
        exchanges = self.exchanges
        held = self.held
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.set_exchanges(exchanges)
            self.held = held

    def share_buffers(self) -> None:
        """Makes the buffers rank 0's, before a forward that trains."""
        if torch.is_grad_enabled() and self.training:
            self._broadcast_buffers()

    @outside_graphs
    def _broadcast_buffers(self) -> None:
        buffers = [b for b in self.module.buffers() if b.numel()]
        if buffers:
            broadcast_from_rank_0(buffers, self.process_group)
