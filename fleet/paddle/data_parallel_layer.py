"""DataParallel: the basic form, without a strategy: ``init_parallel_env(); net = DataParallel(net)``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fleet.errors import ConfigError, NotInitializedError
from fleet.strategies.data_parallel import wrap_data_parallel
from fleet.training.fleet_model import FleetModel


class DataParallel(FleetModel):
    """A module whose gradients are averaged over all workers during backward.

    Names, attributes and ``state_dict`` are those of ``layers``. In a single process it behaves like ``layers``.

    Args:
        layers: the user's module, on the device it trains on.
        strategy: accepted for Fleet's signature; must be ``None``.
        comm_buffer_size: largest bucket of gradients, in MiB.
        last_comm_buffer_size: size of the bucket that is sent last, in MiB.
        find_unused_parameters: accept modules in which some parameters take no part in the loss.
        group: process group; ``None`` is all workers.

    Raises:
        NotInitializedError: the process group was not started.
        ConfigError: an argument has the wrong type.

    Example:
        >>> fleet.init_parallel_env()
        >>> net = fleet.DataParallel(net)
    """

    def __init__(
        self,
        layers: nn.Module,
        strategy: object = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(layers, nn.Module):
            raise ConfigError(f"DataParallel(layers) takes a torch.nn.Module, got {layers!r}.")
        if strategy is not None:
            raise ConfigError("DataParallel(strategy=...) takes None; pass options to fleet.init(strategy=...).")
        for name, value in (("comm_buffer_size", comm_buffer_size), ("last_comm_buffer_size", last_comm_buffer_size)):
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"DataParallel({name}={value!r}): it must be greater than 0, in MiB.")
        chain = layers
        first = next((p for p in layers.parameters() if p.requires_grad), None)
        if _world_size(group) > 1 and first is not None:
            chain = wrap_data_parallel(
                layers,
                device=first.device if first.device.type == "cuda" else torch.device("cpu"),
                process_group=group,
                bucket_MiB=comm_buffer_size,
                last_bucket_MiB=last_comm_buffer_size,
                find_unused_parameters=find_unused_parameters,
            )
        super().__init__(layers, chain)


def _world_size(group: dist.ProcessGroup | None) -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    from fleet.parallel import get_world_size

    if get_world_size() > 1:
        raise NotInitializedError("DataParallel() needs fleet.init_parallel_env() first.")
    return 1
