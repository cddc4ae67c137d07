"""FleetStrategy for Lightning's Trainer: ``Trainer(strategy=FleetStrategy(strategy))``; needs the extra ``lightning``.

[Note: backward inside training_step]
With automatic optimization Lightning calls ``training_step`` through the forward of the wrapped model, and the loss
that it returns is that model's output. With manual optimization ``backward`` and ``step`` run before ``training_step``
returns, so there is no output yet: the loss that ``manual_backward`` gets is watched in its place, and the forward
around it prepares no exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fleet.errors import UnsupportedOptionError
from fleet.integrations._lightning_workers import FleetWorkers
from fleet.options import DistributedStrategy
from fleet.strategies._gradients.gradient_exchange import data_parallel_in
from fleet.training.fleet_model import FleetModel

# isort: split
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

__all__ = ["FleetStrategy"]

_SUPPORTED = (MixedPrecision, HalfPrecision, DoublePrecision)
# Lightning has the first one since 2.5.5.
_AVERAGING = tuple(vars(callbacks)[n] for n in ("WeightAveraging", "StochasticWeightAveraging") if n in vars(callbacks))


class FleetStrategy(FleetWorkers, ParallelStrategy):
    """Trains a LightningModule with the options of a DistributedStrategy.

    The workers are those of the launcher, torchrun or srun; a plain ``python train.py`` is one process. ``fit`` calls
    ``fleet.init``, or takes the session of a script that has called it. What ``configure_optimizers`` returns passes
    through ``fleet.distributed_optimizer``, then the module through ``fleet.distributed_model``. After ``fit`` the
    module stays on its device, as the options have left it.

    Args:
        strategy: the options: a ``fleet.DistributedStrategy``, a dictionary of options, or ``None``.

    Raises:
        ConfigError: an option is wrong, or differs from those of the session that runs.
        UnsupportedOptionError: an option that the Trainer's loops have no place for; the message says why.

    Example:
        >>> trainer = Trainer(strategy=FleetStrategy({"sharding": True}), logger=False)
        >>> trainer.world_size
        1
    """

    def __init__(self, strategy: DistributedStrategy | Mapping[str, Any] | None = None) -> None:
        FleetWorkers.__init__(self, "Trainer", strategy)
        ParallelStrategy.__init__(self, **self._lightning_arguments())
        self._syncs = True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which rows this worker trains on."""
        rank, replicas = self._replicas()
        return {"num_replicas": replicas, "rank": rank}

    # ---- set-up ----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Joins the job."""
        if self._layer_sync is not None and not isinstance(self._layer_sync, TorchSyncBatchNorm):
            raise UnsupportedOptionError(
                f"Trainer(plugins=...): {type(self._layer_sync).__name__} changes layers in a way that Fleet does not "
                "know. Leave it out; strategy.sync_batch_norm shares batch norms."
            )
        self._start(sync_batch_norm=self._layer_sync is not None)
        super().setup_environment()
        self._check_precision(self.precision_plugin, _SUPPORTED)
        if self.session.options["to_static"]:
            raise UnsupportedOptionError(
                "strategy.to_static compiles the forward, in whose place Lightning's Trainer puts training_step anew "
                "for every batch. Turn it off, and compile the submodules in configure_model()."
            )

        if self.session.job.axes.size("mp") > 1 and self.session.options["tensor_parallel_configs"].plan:
            raise UnsupportedOptionError(
                "tensor_parallel_configs['plan'] divides a plain module and tries the result on a copy, which runs its "
                "forward; Lightning's Trainer has put training_step in its place. Build the module of "
                "fleet.meta_parallel.ColumnParallelLinear and RowParallelLinear, or use Fabric."
            )

    def setup(self, trainer: Trainer) -> None:
        """Prepares module and optimizers for ``fit``, and the module for the other calls of the Trainer."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        if self._found(module) is None:
            self.precision_plugin.convert_module(module)
            self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self._check_divided(trainer)
            self.setup_optimizers(trainer)
        self.model = self._wrapped(module)
        self._check_several()
        self.setup_precision_plugin()

    def process_dataloader(self, dataloader: object) -> object:
        """Returns the loader, whose processes start with the first batch of an epoch.

        Lightning begins to iterate before it gives the sampler its epoch (its issue 21938): processes that started then
        would have the order of the epoch before, after a resume at the end of one.
        """
        if type(dataloader) is DataLoader and dataloader.num_workers:
            dataloader.__class__ = _LateLoader
        return super().process_dataloader(dataloader)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Takes the optimizers and schedulers of ``configure_optimizers``, with the options around the optimizers."""
        super().setup_optimizers(trainer)
        self.optimizers = [o if _is_absent(o) else self._wrapped_optimizer(o) for o in self.optimizers]

    def model_to_device(self) -> None:
        """Moves the module to the device of this worker."""
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    def teardown(self) -> None:
        """Ends a call of the Trainer; the session goes on, for the next one."""
        self.model = self.lightning_module
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- training --------------------------------------------------------------------------------------------------

    @property
    def _is_manual(self) -> bool:
        return self.lightning_module is not None and not self.lightning_module.automatic_optimization

    def _check_divided(self, trainer: Any) -> None:
        """Raises UnsupportedOptionError where workers have parts of the parameters, and the script needs whole ones."""
        if not self._divides_parameters:
            return
        averages = [c for c in trainer.callbacks if isinstance(c, _AVERAGING)]
        if averages:
            raise UnsupportedOptionError(
                f"{type(averages[0]).__name__} copies whole parameters, and sharding stage 3 leaves a part of "
                "each on every worker. Set sharding_configs['stage'] to 1 or 2, or leave the callback out."
            )
        if self._is_manual:
            raise UnsupportedOptionError(
                "sharding stage 3 gives the parameters back to their workers when a forward ends, and with "
                "automatic_optimization = False backward and step run inside it. Set sharding_configs['stage'] to 1 "
                "or 2, or use automatic optimization."
            )

    def _check_several(self) -> None:
        """Raises UnsupportedOptionError where a backward pass would wait for gradients of another optimizer."""
        reducer = data_parallel_in(self.model._chain) if isinstance(self.model, FleetModel) else None
        if reducer is not None and len(self.optimizers) > 1 and not reducer.find_unused_parameters:
            raise UnsupportedOptionError(
                f"configure_optimizers() returned {len(self.optimizers)} optimizers, and a backward pass usually "
                "reaches the parameters of one of them: the exchange of gradients would wait for the others. Set "
                "strategy.find_unused_parameters = True."
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``training_step`` inside the wrapped model; see [Note: backward inside training_step]."""
        assert isinstance(self.model, FleetModel)
        self.model._follow_mode()  # Lightning changes the mode of the module
        with self.model.no_sync() if self._is_manual else nullcontext():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward pass of ``closure_loss``, in which gradients are exchanged."""
        if self._is_manual:
            assert isinstance(self.model, FleetModel)
            closure_loss = self.model.watch_loss(closure_loss, exchanges=self._syncs)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """While it is open, gradients stay on their worker: for all but the last batch of an update."""
        before = self._syncs
        self._syncs = False
        try:
            with self.model.no_sync() if isinstance(self.model, FleetModel) else nullcontext():
                yield
        finally:
            self._syncs = before

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a whole state is loaded by a model that knows its part: where layers are divided."""
        return self.session.job.axes.size("mp") > 1

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the whole state under the names of the plain module; every worker calls it."""
        assert self.lightning_module is not None
        return self._whole_model_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the whole state; every worker calls it."""
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self._whole_optimizer_state(plain)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns the content of a file; code in it is never run."""
        return super().load_checkpoint(checkpoint_path, weights_only=self._safely(weights_only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the whole state of the module; every worker calls it."""
        assert self.lightning_module is not None
        self._load_model_state(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the whole states of the optimizers; every worker calls it."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


class _LateLoader(DataLoader[Any]):
    """Starts its processes when the first batch is asked for."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def _is_absent(optimizer: Optimizer) -> bool:
    """Returns whether Lightning put ``optimizer`` in the place of none: configure_optimizers returned nothing."""
    return type(optimizer).__name__ == "_MockOptimizer"
