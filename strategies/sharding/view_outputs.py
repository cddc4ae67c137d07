"""Outputs of units that are views: a change in place takes no unit's backward away."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fleet.strategies._gradients.passes import outside_graphs
from fleet.strategies._gradients.viewed import hook_viewed


def keep_backward_of_views(unit: nn.Module) -> None:
    """Makes ``unit``, which ``fully_shard`` divided, be gathered in backward whatever becomes of its outputs."""
    # torch warns that a change in place would lose the hook; it does not any longer.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    unit.register_forward_hook(_hook_viewed)


@outside_graphs
def _hook_viewed(unit: Any, inputs: Any, output: Any) -> None:
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            hook_viewed(leaf, unit._get_fsdp_state()._pre_backward)
