"""PipelineModel: the result of ``fleet.distributed_model`` for a PipelineLayer; its loop is ``train_batch``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.job.axes import COPY_AXES, SEQUENCE_AXES
from fleet.job.job import Job
from fleet.strategies.pipeline.counted_loss import CountedLoss
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.strategies.pipeline.hooks import Hook, PipelineParallelMicroStepLocations, StepHooks
from fleet.strategies.pipeline.order import MicroStep, as_text, plan_order
from fleet.strategies.pipeline.stage import PipelineStage, stage_of
from fleet.strategies.pipeline.step import PipelineStep
from fleet.strategies.tensor_parallel.regions import reduce_from
from fleet.training.fleet_model import FleetModel
from fleet.training.fleet_optimizer import FleetOptimizer

_TRAIN, _EVAL, _OUTPUTS = range(3)


class PipelineModel(FleetModel):
    """A FleetModel whose layers may lie on several workers: a step is one call on all of them.

    Where one worker has all layers, calls and ``loss.backward()`` work as with any model, too.
    """

    @property
    def _layers_here(self) -> StagedLayers:
        return cast(StagedLayers, self.module)

    @property
    def _stage(self) -> PipelineStage | None:
        return stage_of(self.module)

    @property
    def _hooks(self) -> StepHooks:
        hooks: StepHooks = self.__dict__.setdefault("_step_hooks", StepHooks())
        return hooks

    @property
    def _counted(self) -> CountedLoss:
        known: CountedLoss | None = self.__dict__.get("_counted_loss")
        if known is None:
            axes = self._job.axes
            averages = self._job.options["gradient_scale_configs"].scale_strategy == "avg"
            replicas = float(axes.data_replicas) if averages else 1.0
            joined = partial(reduce_from, group=axes.group(*SEQUENCE_AXES))
            known = CountedLoss(axes.group(*COPY_AXES), joined, replicas)
            self.__dict__["_counted_loss"] = known
        return known

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layers; raises ConfigError where other workers have some of them."""
        if self._stage is not None:
            raise ConfigError(
                f"model(...) was called, and stage {self._stage.place.stage} of {self._stage.place.num_stages} has a "
                "part of the layers. Call loss = model.train_batch([inputs, labels], optimizer) on every worker, and "
                "model.eval_batch([inputs, labels], compute_loss=True) to evaluate."
            )
        return super().forward(*args, **kwargs)

    def train_batch(
        self,
        data: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        scaler: Any = None,
        loss_fn_idx: int = 0,
        return_micro_batch_loss: bool = False,
    ) -> Any:
        """Trains on one batch: forward and backward of each micro-batch, one update; every worker calls it.

        Args:
            data: ``(inputs, labels)``, each a tensor, a list of micro-batches, or a tuple or dictionary of these; or an
                iterator over (input, label) of micro-batches. The first and the last stage need it.
            optimizer: what ``fleet.distributed_optimizer`` returned; it steps, and its gradients are cleared.
            lr_scheduler: stepped after the update.
            scaler: a GradScaler that ``fleet.distributed_scaler`` has seen; it scales, steps and is updated.
            loss_fn_idx: which of several loss functions is differentiated.
            return_micro_batch_loss: return the losses of the micro-batches.

        Returns:
            The mean loss of this worker's batch, a scalar that is equal on all stages; with
            ``return_micro_batch_loss`` a vector; with several loss functions a list of these.

        Raises:
            ConfigError: the data does not fit ``pipeline_configs``, or the optimizer is not Fleet's.
        """
        job = self._job_for("train_batch")
        if not isinstance(optimizer, FleetOptimizer):
            raise ConfigError(
                f"train_batch(data, optimizer) got {type(optimizer).__name__}; pass what "
                "fleet.distributed_optimizer(optimizer) returned."
            )
        self.train()
        for listener in job.listeners.hearing["before_forward"]:
            listener.before_forward(self)
        with job.explaining():
            for listener in job.listeners.hearing["rows_given"]:
                listener.rows_given(self, data, "train_batch()")
            step = self._new_step(_TRAIN, loss_fn_idx, None if scaler is None else scaler.scale)
            result = self._trained(step, data, return_micro_batch_loss)
            self._update(optimizer, lr_scheduler, scaler)
        return result

    def eval_batch(
        self, data: Any, compute_loss: bool = False, loss_fn_idx: int = 0, return_host_tensor: bool = False
    ) -> Any:
        """Runs one batch in evaluation mode, which it leaves on; every worker calls it. No gradients are recorded.

        Args:
            data: as for :meth:`train_batch`; without ``compute_loss`` labels may be ``None``.
            compute_loss: return the loss, as :meth:`train_batch` does.
            loss_fn_idx: accepted for Fleet's signature; all losses are returned where there are several.
            return_host_tensor: return outputs in host memory.

        Returns:
            The loss; or the outputs of the micro-batches in a list, which is empty on all stages but the last.
        """
        job = self._job_for("eval_batch")
        self.eval()
        with job.explaining(), torch.no_grad():
            step = self._new_step(_EVAL if compute_loss else _OUTPUTS, loss_fn_idx, None)
            step.compute(data)
            if compute_loss:
                return self._losses(step, False)
        if not return_host_tensor:
            return step.outputs
        return [tree_map_only(Tensor, Tensor.cpu, output) for output in step.outputs]

    # ---- what Fleet has beside the loop ---------------------------------------------------------------------------

    def register_hook(self, location: PipelineParallelMicroStepLocations, hook: Hook) -> None:
        """Runs ``hook`` at the begin or end of each micro-batch's forward or backward.

        It is called with the keywords input_tensor, output_tensor, input_tensor_grad, output_tensor_grad and step_id,
        the number of the micro-batch; a tensor that does not exist at the location, or was freed, is ``None``.
        """
        self._hooks.add(location, hook)

    def register_forward_pipeline_parallel_hook(self, location: int, hook: Hook) -> None:
        """Runs ``hook(location)`` after the forward of that number in each step, counted from 0."""
        self._hooks.add_after("f", location, hook)

    def register_backward_pipeline_parallel_hook(self, location: int, hook: Hook) -> None:
        """Runs ``hook(location)`` after the backward of that number in each step, counted from 0."""
        self._hooks.add_after("b", location, hook)

    def register_bubble_pipeline_parallel_hook(self, location: int, hook: Hook) -> None:
        """Refused: the engine does not stop where a stage waits."""
        raise UnsupportedOptionError(
            f"register_bubble_pipeline_parallel_hook({location!r}, ...): a stage waits inside a receive, and nothing "
            "runs then. Use register_forward_pipeline_parallel_hook or register_backward_pipeline_parallel_hook."
        )

    def get_static_scheduler(self) -> str:
        """Returns the actions of this stage in a step: ``'f0;f1;b0;...'``, with chunks ``'f0_vp0;...'``."""
        layers = self._layers_here
        self._job_for("get_static_scheduler")
        return as_text(self._order(), num_chunks=layers.num_chunks if layers.num_stages > 1 else 1)

    def runs_forwards_first(self) -> bool:
        """Returns whether this stage starts backward only after all its forwards of a step."""
        kinds = [step.what for step in self._order()]
        return kinds == sorted(kinds, reverse=True)

    def _order(self) -> tuple[MicroStep, ...]:
        layers = self._layers_here
        config = self._job.options["pipeline_configs"]
        num_chunks = layers.num_chunks if layers.num_stages > 1 else 1
        return plan_order(
            layers.num_stages, layers.stage, config.accumulate_steps, num_chunks=num_chunks, mode=config.schedule_mode
        )

    def is_pipeline_first_stage(self) -> bool:
        """Returns whether this worker has the first layers."""
        return self._layers_here.stage == 0

    def is_pipeline_last_stage(self) -> bool:
        """Returns whether this worker has the last layers."""
        return self._layers_here.stage == self._layers_here.num_stages - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> FleetModel:
        twin = super().__deepcopy__(memo)
        if self._stage is not None:
            object.__setattr__(twin, "_trains", False)
        return twin

    # ---- a step ---------------------------------------------------------------------------------------------------

    def _job_for(self, call: str) -> Job:
        if not self._trains:
            raise ConfigError(
                f"{call}() was called on a copy of a model that distributed_model() returned. Call it on that model."
            )
        return self._job

    def _new_step(self, mode: int, loss_index: int, scale: Any) -> PipelineStep:
        options = self._job.options
        config = options["pipeline_configs"]
        self._hooks.begin_step()
        return PipelineStep(
            self._layers_here, self._run_chunk, self._stage, config.accumulate_steps, config.micro_batch_size,
            mode=mode, loss_index=loss_index, scale=scale, hooks=self._hooks,
            delays=self._stage is not None and self._stage.pp_configs.delay_scale_loss, counted=self._counted,
        )  # fmt: skip

    def _run_chunk(self, chunk: int, value: Any, is_last: bool) -> Any:
        if self._stage is None and torch.is_grad_enabled():
            self.require_backward_grad_sync = is_last  # the micro-batches before it stay local
        given = {"chunk_id": chunk} if self._stage is not None and self._layers_here.num_chunks > 1 else {}
        return self._run(value, **given)

    def _trained(self, step: PipelineStep, data: Any, each: bool) -> Any:
        stage = self._stage
        with self._in_step():
            if stage is None:
                step.compute(data)
            else:
                stage.reducer.begin()
                step.compute(data)
                stage.reducer.finish(stage.ties.sum_gradients, lambda: {p: name for name, p in self.named_parameters()})
        # The losses come first: their broadcast tells every stage the divisor.
        losses = self._losses(step, each)
        step.divide_gradients()
        return losses

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        before = self.require_backward_grad_sync
        object.__setattr__(self, "runs_micro_batches", True)
        try:
            yield
        finally:
            object.__setattr__(self, "runs_micro_batches", False)
            self.require_backward_grad_sync = before

    def _losses(self, step: PipelineStep, each: bool) -> Any:
        found = [values if each else mean for mean, values in step.losses()]
        return found if isinstance(self._layers_here.__dict__["_loss_fn"], list | tuple) else found[0]

    def _update(self, optimizer: FleetOptimizer, lr_scheduler: Any, scaler: Any) -> None:
        if scaler is None:
            optimizer.step()
        else:
            # A GradScaler makes its scale in its first scale(), and only the last stage has a loss.
            if not self.is_pipeline_last_stage():
                scaler.scale(torch.zeros((), device=next(self.parameters()).device))
            scaler.step(optimizer)
            scaler.update()
        self._synchronize(optimizer)
        optimizer.clear_grad()
        if lr_scheduler is not None:
            lr_scheduler.step()
        clears = self._stage is not None and self._stage.pp_configs.clear_every_step_cache
        if clears and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _synchronize(self, optimizer: FleetOptimizer) -> None:
        """Makes parameters that stages share equal again, and their optimizer state, where the options ask for it."""
        stage = self._stage
        if stage is None or not stage.layers.ties:
            return
        settings = stage.pp_configs
        state = optimizer.state
        if settings.sync_param:
            stage.ties.synchronize(settings.sync_mode, lambda p: [p.data])
        if settings.sync_moment:
            stage.ties.synchronize(
                settings.sync_mode,
                lambda p: [value for _, value in sorted(state.get(p, {}).items()) if isinstance(value, Tensor)],
            )


PipelineParallel = PipelineModel
