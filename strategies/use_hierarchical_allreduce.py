"""use_hierarchical_allreduce: gradients are summed inside each group of neighbours first, then between the groups."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._base import NOT_YET, Stage, Strategy, Values
from fleet.strategies._config import Config, setting


@dataclass(frozen=True, kw_only=True)
class HierarchicalSettings(Config):
    """The size of a group."""

    hierarchical_allreduce_inter_nranks: int = setting(
        1, "workers in each inner group of use_hierarchical_allreduce, usually those of a node", at_least=1
    )


class UseHierarchicalAllreduce(Strategy):
    """Sums gradients inside groups of neighbouring ranks, then between the groups."""

    name = "use_hierarchical_allreduce"
    meaning = "Sum gradients inside each node first, then between nodes."
    stage = Stage.COMM
    Settings = HierarchicalSettings
    refused = NOT_YET
    model_effect = "sums gradients inside each group of neighbours, then between the groups"

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when the workers cannot be divided into equal groups."""
        size = options["hierarchical_allreduce_inter_nranks"]
        if world_size % size == 0:
            return None
        return (
            f"hierarchical_allreduce_inter_nranks is {size}, which does not divide the {world_size} processes that "
            f"were started. Set it to the number of workers per node."
        )
