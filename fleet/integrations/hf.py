"""FleetTrainer: Hugging Face's Trainer with Fleet's strategies; needs the extra ``hf``.

[Note: Where Fleet acts]
Trainer leaves four things to Accelerate: it prepares the model and the optimizer, it says how rows are divided, and it
clips. FleetTrainer gives it an Accelerator that asks Fleet for these (_hf_accelerator.py). Loop, data loaders,
schedules, callbacks and files stay Trainer's. What Trainer reads from a model or an optimizer to write a file is made
whole first, where an option divides it.

[Note: Items in a batch]
Trainer divides the loss by the number of labels of all workers, multiplies it by their number, and lets the exchange
average. A model that accepts that number and ignores it (BertForSequenceClassification) would get a loss that is too
large by the number of workers. Here the loss is divided by the labels per worker, and not multiplied: the same where
the number is used, and the mean where it is not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import fleet
from fleet.common.extras import install_line
from fleet.elastic.health import Health
from fleet.errors import CheckpointError, ConfigError, UnsupportedOptionError
from fleet.job.running import running_session
from fleet.job.session import Session
from fleet.options import DistributedStrategy
from fleet.trackers.run_log import RunLog
from fleet.training.fleet_model import FleetModel

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import has_length

    from fleet.integrations._hf_accelerator import FleetAccelerator, divides
    from fleet.integrations._hf_arguments import agree, check_job, check_running, checked_options, precision_of
except ImportError as error:
    raise UnsupportedOptionError(
        f"fleet.integrations.hf needs the extra hf ({error}); {install_line('hf')}."
    ) from error

__all__ = ["FleetTrainer"]

_OWN_STATE = "fleet_state_{}.pt"


class FleetTrainer(Trainer):  # type: ignore[misc]
    """Trains as ``transformers.Trainer`` does, on the workers of a Fleet job and with the options of a strategy.

    Started by ``python -m fleet.launch``, torchrun or srun; a plain ``python`` is one process. Everything that Trainer
    takes and has stays, but for arguments that act in its own distributed training (``fsdp``, ``deepspeed``), which are
    refused with the option to use. ``fp16`` and ``bf16`` turn ``strategy.amp`` on.

    Args:
        model, args, ...: as of Trainer.
        strategy: a DistributedStrategy or a dictionary of its options. ``None`` takes those of the ``fleet.init`` that
            has run, or defaults where none has.

    Raises:
        ConfigError: an option or an argument cannot work here. Nothing was started.
        RendezvousError: not every worker joined in time.

    Example:
        >>> trainer = FleetTrainer(model, TrainingArguments("out"), train_dataset=rows, strategy={"sharding": True})
    """

    model: Any
    optimizer: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *rest: Any,
        strategy: DistributedStrategy | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = TrainingArguments(output_dir="tmp_trainer")  # Trainer's own default
        if isinstance(model, FleetModel):
            raise ConfigError(
                "FleetTrainer(model=...) takes your model and wraps it; got what distributed_model() made."
            )
        # The job comes first: Trainer's __init__ makes the Accelerator, which asks the session.
        self._session = _start(model, args, strategy)
        self._whole_state: dict[str, Any] | None = None
        agree(args, self._session.job)
        super().__init__(model, args, *rest, **kwargs)
        # Trainer's __init__ finds out whether the model is divided.
        self._check_places()
        self.add_callback(_StopWhenAsked())

    def _check_places(self) -> None:
        """Raises ConfigError for a model that transformers has divided itself."""
        divided = getattr(self, "is_distributed_loading_by_transformers", False) or (
            (getattr(self.model, "tp_size", None) or getattr(self.model, "_tp_size", None) or 1) > 1
        )
        if divided or (self.is_model_parallel and self._session.job.world_size > 1):
            raise UnsupportedOptionError(
                "FleetTrainer: from_pretrained() has divided the model (device_map, tp_plan, distributed_config). Load "
                "it whole, and let Fleet divide it: strategy.sharding, or strategy.tensor_parallel_configs = "
                "{'plan': 'auto'}."
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the Accelerator, which asks Fleet; raises where it was told to divide the model itself."""
        asked = precision_of(self.args)
        self.args.mixed_precision = "no"  # Fleet's amp computes in 16 bits
        try:
            super().create_accelerator_and_postprocess()
        finally:
            # The script and the saved arguments show the precision that was asked for.
            self.args.mixed_precision = asked
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UnsupportedOptionError(
                "accelerate launch has turned DeepSpeed or FSDP on, and Fleet divides the model: strategy.sharding. "
                "Start the script with python -m fleet.launch or torchrun."
            )
        FleetAccelerator.take_over(self.accelerator, self._session)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        """Returns the model that evaluation runs as Fleet wraps it; in training it is prepared with the optimizer."""
        if not training:
            return self.accelerator.fleet_model(model)
        return super()._wrap_model(model, training, dataloader)

    def get_train_dataloader(self) -> Any:
        """Returns Trainer's loader; warns where its last batch of an epoch counts rows twice."""
        loader = super().get_train_dataloader()
        batch = self._train_batch_size * self._session.job.data_replicas
        length = len(self.train_dataset) if has_length(self.train_dataset) else 0
        fills = self._session.job.data_replicas > 1 and not self.args.dataloader_drop_last
        if fills and not self.accelerator.split_batches and length % batch:
            self._session.job.say(
                f"TrainingArguments(dataloader_drop_last=False): {length} rows are no multiple of {batch}, the rows of "
                f"all workers' batches, so Trainer fills the last batch of an epoch with {-length % batch} rows from "
                "its beginning, which count twice. dataloader_drop_last=True leaves that batch out."
            )
        return loader

    # ---- loss --------------------------------------------------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Returns the number of labels that the loss is divided by, see [Note: Items in a batch]."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        if count is None or not self.args.average_tokens_across_devices:
            return count
        return count / self._session.job.data_replicas

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss as Trainer computes it, not multiplied by the number of workers."""
        with self.accelerator.counting_one():
            return super().compute_loss(*args, **kwargs)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the rows of an update over all workers."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self._session.job.data_replicas)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes one batch of an evaluation, and tells the launcher that this worker is alive."""
        self._session.job.beat()
        return super().prediction_step(*args, **kwargs)

    # ---- files -------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the whole model, which ``from_pretrained`` loads; worker 0 writes.

        Where an option divides the model, every worker must call it.
        """
        wrapped = self._wrapped
        if wrapped is not None and divides(wrapped):
            # Every worker gathers here, before Trainer branches by rank: a gather inside that branch would wait for
            # workers that never come.
            self._whole_state = _tied(wrapped.full_state_dict(keep=self.args.should_save), wrapped.module)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            self._whole_state = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._whole_state if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes the whole state of the optimizer on worker 0, and the states that differ between workers."""
        prepared = self.optimizer
        whole = prepared.optimizer.full_state_dict(keep=self.args.should_save)
        # Trainer writes self.optimizer.state_dict(); every worker took part in gathering the whole state above.
        self.optimizer = SimpleNamespace(state_dict=lambda: whole)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = prepared
        if self._session.job.world_size > 1 and prepared.optimizer.has_own_state:
            os.makedirs(output_dir, exist_ok=True)
            own = {"model": self._wrapped.local_state_dict(), "optimizer": prepared.optimizer.local_state_dict()}
            own["workers"] = self._session.job.world_size
            fleet.save(own, os.path.join(output_dir, _OWN_STATE.format(self._session.job.global_rank)))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not os.path.exists(os.path.join(checkpoint, _OWN_STATE.format(0))):
            return
        path = os.path.join(checkpoint, _OWN_STATE.format(self._session.job.global_rank))
        own = fleet.load(path) if os.path.exists(path) else {"workers": "fewer"}
        if own["workers"] != self._session.job.world_size:
            raise CheckpointError(
                f"{checkpoint} holds the state of {own['workers']} workers, whose models differ with this strategy, "
                f"and the job has {self._session.job.world_size}. Resume with as many workers."
            )
        self._wrapped.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self._loading_whole():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with self._loading_whole():
            super()._load_best_model()

    @contextmanager
    def _loading_whole(self) -> Iterator[None]:
        """Redirects Trainer's loading inside the context to the wrapped model, where an option divides it."""
        plain = self.model
        wrapped = self._wrapped
        if wrapped is not None and divides(wrapped):
            self.model = wrapped
        try:
            yield
        finally:
            self.model = plain

    @property
    def _wrapped(self) -> Any:
        """The wrapped model, or ``None`` before Trainer has prepared it."""
        return next((model for model in self._session.models if model.module is self.model), None)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains; when the job was asked to stop, it writes a checkpoint and leaves with ``elastic.PREEMPTED``."""
        result = super().train(*args, **kwargs)
        health = self._session.job.listeners.find(Health)
        if health is not None and health.is_preempted:
            raise SystemExit(fleet.elastic.PREEMPTED)
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs as Trainer does, and to the job's trackers (``strategy.trackers``, the launcher's ``--tracker``)."""
        super().log(logs, *args, **kwargs)
        if self._session.job.listeners.get(RunLog).is_recorded:
            numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            fleet.log(numbers, step=self.state.global_step)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises UnsupportedOptionError: trials would follow each other in one job, with the options of the first."""
        raise UnsupportedOptionError("FleetTrainer.hyperparameter_search(): start one job for each trial.")


def _tied(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Returns a whole ``state`` whose names of one parameter share a tensor, so that transformers writes it once."""
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known in state and name in state:
            state[name] = state[known]
    return state


class _StopWhenAsked(TrainerCallback):  # type: ignore[misc]
    """Saves and stops at the step that the workers have agreed on, when the job was asked to stop."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if fleet.preempted():
            control.should_save = control.should_training_stop = True
        return control


def _start(model: Any, args: Any, strategy: Any) -> Session:
    """Returns the session that trains ``model``: a running one whose options it keeps, or a new one."""
    session = running_session()
    if session is not None and not session.job.closed and strategy is None:
        check_running(session.options, args)
    else:
        options = checked_options(strategy, args)
        wrapped = [] if session is None or session.job.closed else session.models
        if session is None or session.options != options or not any(known.module is model for known in wrapped):
            fleet.init(is_collective=True, strategy=options)
    session = running_session()
    assert session is not None
    check_job(args, session.job)
    return session
