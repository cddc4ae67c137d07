"""ShardingCalls: the public calls of Fleet that have to do with sharding and the mesh; Fleet inherits them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from fleet import group_sharded
from fleet._model import FleetModel
from fleet._optimizer import FleetOptimizer
from fleet._session import Session
from fleet.topology import HybridCommunicateGroup, communicate_group

if TYPE_CHECKING:
    import torch.distributed as dist


class ShardingCalls:
    """Expects what Fleet has: the session, and the calls that these build on."""

    if TYPE_CHECKING:

        def _need(self, call: str) -> Session: ...
        def distributed_scaler(self, scaler: Any) -> Any: ...  # noqa: D102
        def barrier_worker(self) -> None: ...  # noqa: D102

    def group_sharded_parallel(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        level: str,
        scaler: Any = None,
        group: dist.ProcessGroup | None = None,
        offload: bool = False,
        sync_buffers: bool = False,
        buffer_max_size: int = 2**23,
        segment_size: int = 2**20,
        sync_comm: bool = False,
        dp_group: dist.ProcessGroup | None = None,
        exclude_layer: list[Any] | None = None,
    ) -> tuple[FleetModel, FleetOptimizer, Any]:
        """Returns model, optimizer and scaler with the state divided among workers, without a strategy.

        Args:
            model: the user's module; load a checkpoint before this call.
            optimizer: the user's optimizer.
            level: ``"os"`` divides the optimizer state, ``"os_g"`` the gradients too, ``"p_g_os"`` the parameters too.
            scaler: a ``torch.amp.GradScaler`` or ``None``.
            group: the workers that share one copy; ``None`` is all.
            offload: keep the optimizer state in host memory (with "os_g" and "p_g_os" gradients and parts too).
            sync_buffers: accepted; buffers are worker 0's before each training forward in any case.
            buffer_max_size: bytes that are gathered or sent at once.
            segment_size: accepted; it changes nothing.
            sync_comm: accepted; it changes nothing.
            dp_group: workers that hold copies of what ``group`` shares.
            exclude_layer: must be empty.

        Raises:
            NotInitializedError: before ``fleet.init``.
            ConfigError: an argument is wrong, or options are on that need ``distributed_model``.

        Example:
            >>> model, optimizer, scaler = fleet.group_sharded_parallel(model, optimizer, "p_g_os")
        """
        session = self._need("group_sharded_parallel")
        group_sharded.check_arguments(level, buffer_max_size, segment_size, sync_comm, exclude_layer)
        wrapped, stepped = group_sharded.shard_by_groups(
            session, model, optimizer, level, group=group, dp_group=dp_group, offload=offload,
            buffer_max_size=buffer_max_size,
        )  # fmt: skip
        return wrapped, stepped, None if scaler is None else self.distributed_scaler(scaler)

    def save_group_sharded_model(self, model: FleetModel, output: str, optimizer: FleetOptimizer | None = None) -> None:
        """Writes the whole states to ``output``/model.pdmodel and model.pdopt; every worker must call it.

        Worker 0 writes, and all return when the files are there.

        Raises:
            ConfigError: model or optimizer are not those that were returned by Fleet.
            CheckpointError: ``output`` is a file, or cannot be written.
        """
        session = self._need("save_group_sharded_model")
        group_sharded.save_states(model, output, optimizer, session.global_rank == 0)
        self.barrier_worker()

    def get_hybrid_communicate_group(self) -> HybridCommunicateGroup:
        """Returns this worker's place along every axis of the mesh, and the process groups."""
        return communicate_group(self._need("get_hybrid_communicate_group"))
