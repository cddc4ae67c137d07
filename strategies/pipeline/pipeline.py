"""pipeline: the layers are divided among workers, and micro-batches flow through them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from fleet.env import Environment
from fleet.errors import ConfigError, OptionWarning
from fleet.strategies._declare.degrees import degrees_or_none
from fleet.strategies._declare.fields import Config, Values, setting
from fleet.strategies._declare.strategy import Guide, Stage, Strategy
from fleet.strategies.pipeline.descriptions import StagedLayers

if TYPE_CHECKING:
    from fleet.job.job import Job
    from fleet.strategies.pipeline.stage import StreamGroups

# The engine is imported where a pipeline is made: every job imports this module, and most have one stage.

# Fleet's switches of its transfers between stages, and why they have no effect here.
_WITHOUT_MEANING = {
    "FLAGS_p2p_device_synchronize": "a stage waits for each tensor that it receives, and for no device; to find the "
    "operation that fails, set CUDA_LAUNCH_BLOCKING=1",
    "PADDLE_P2P_SYNC_SEND": "a send returns at once and its tensor is kept until it has left; each direction has a "
    "stream of its own, which keeps the order",
}


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Config, option="pipeline_configs"):
    """How a batch is cut, and in which order its parts run."""

    read_by_models = True  # train_batch of a PipelineLayer reads them with one stage, too
    micro_batch_size: int = setting(1, "samples per micro-batch", at_least=1)
    accumulate_steps: int = setting(1, "micro-batches per step; times micro_batch_size, the batch", at_least=1)
    schedule_mode: str = setting(
        "1F1B",
        "'1F1B' starts backward as early as it can and keeps fewer activations; 'F-then-B' runs all forwards first",
        choices=("1F1B", "F-then-B"),
    )
    p2p_cache_shape: bool = setting(
        True, "send the shapes of activations once for each shape of the data; False sends them with every activation"
    )
    enable_partial_send_recv: bool = setting(
        True,
        "with tensor parallelism, send a part of each activation and gather it on the other side",
        no_meaning="activations are sent whole: only bandwidth differs, and parts are right for equal activations only",
    )
    split: tuple[str, ...] = setting(
        [],
        "cuts a plain model, whose forward calls one layer after the other: the names of the first layer of each stage "
        "but the first, or 'auto' for stages with about as many parameters",
    )

    def __post_init__(self) -> None:
        """Reads ``"auto"`` as a list, too."""
        asked: object = self.split
        if asked == "auto":
            from fleet.strategies.pipeline.split import AUTO

            object.__setattr__(self, "split", AUTO)
        super().__post_init__()


class Pipeline(Strategy):
    """Divides the layers into stages on different workers."""

    name = "pipeline"
    meaning = "Divide the layers among workers and stream micro-batches through them."
    stage = Stage.SHARD
    Config = PipelineConfig
    conflicts = {
        "localsgd": "localsgd averages whole models, and a pipeline stage holds a part of one",
        "adaptive_localsgd": "adaptive_localsgd averages whole models, and a pipeline stage holds a part of one",
        "dgc": "dgc exchanges gradients of whole models, and a pipeline stage holds a part of one",
        "gradient_merge": "a pipeline adds up micro-batches already; set pipeline_configs['accumulate_steps'] instead",
    }
    model_effect = "keeps this worker's stage of the layers"
    optimizer_effect = "updates this worker's stage once all micro-batches are through"
    guide = Guide(
        when="The model does not fit into the memory of one worker, or the links between workers are slow.",
        cost="Stages wait while the first micro-batches arrive and the last ones leave; more micro-batches, and chunks "
        "(num_virtual_pipeline_stages of PipelineLayer), make that share smaller. Per boundary and micro-batch one "
        "activation travels forward and its gradient back. A step is one call, model.train_batch([inputs, labels], "
        "optimizer). The example cuts a plain model, whose "
        "loss goes to distributed_model(model, loss_fn) before the optimizer is made; PipelineLayer describes any list "
        "of layers.",
        formula="idle share = (p - 1) / (v n + p - 1) with p stages, n micro-batches and v chunks per stage; stage s "
        "keeps the activations of min(p - s, n) micro-batches in 1F1B without chunks",
        source="Narayanan et al., 2021, Efficient large-scale language model training on GPU clusters using "
        "Megatron-LM, arXiv 2104.04473",
        example={
            "pipeline": True,
            "hybrid_configs": {"pp_degree": 2},
            "pipeline_configs": {"accumulate_steps": 4, "micro_batch_size": 2, "split": "auto"},
        },
    )

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether the switch is on or a pipeline degree is above 1."""
        return bool(options["pipeline"] or options["hybrid_configs"].pp_degree > 1)

    @classmethod
    def replaces(cls, options: Values) -> Mapping[str, Sequence[str]]:
        """Returns data_parallel where there are stages: it exchanges after one backward pass, and a step has many."""
        hybrid = options["hybrid_configs"]
        honoured = ["gradient_scale_configs", "find_unused_parameters", "fuse_all_reduce_ops", "fuse_grad_size_in_MB"]
        if hybrid.pp_configs.dp_comm_overlap or hybrid.pp_configs.sharding_comm_overlap:
            honoured.append("last_comm_group_size_MB")
        return {"data_parallel": honoured} if hybrid.pp_degree > 1 else {}

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when an overlap is asked for that has nothing to overlap with."""
        hybrid = options["hybrid_configs"]
        settings = hybrid.pp_configs
        if settings.dp_comm_overlap and settings.sharding_comm_overlap:
            return (
                "pp_configs['dp_comm_overlap'] and ['sharding_comm_overlap'] are both True, and a gradient is "
                "exchanged once, over both axes together. Set one of them."
            )
        return None

    @classmethod
    def effects(cls, options: Values, world_size: int) -> tuple[str, str]:
        """Returns the effects on the model and on the optimizer; none with one stage."""
        if cls._has_one_stage(options, world_size):
            return "keeps all layers: pp_degree is 1", ""
        return cls.model_effect, cls.optimizer_effect

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one stage holds all layers, unless train_batch() has something to do yet."""
        config = options["pipeline_configs"]
        if not cls._has_one_stage(options, world_size) or config.split or config.accumulate_steps > 1:
            return ()
        return ("pipeline changes nothing: hybrid_configs['pp_degree'] is 1, so every worker holds all layers.",)

    @staticmethod
    def _has_one_stage(options: Values, world_size: int) -> bool:
        degrees = degrees_or_none(options, world_size)
        return degrees is not None and degrees["pp"] == 1

    def __init__(self, config: Any, job: Job) -> None:
        """Makes the process groups between stages; every worker does so at the same point."""
        super().__init__(config, job)
        self._dropped = WeakTensorKeyDictionary()  # parameters of other stages
        for name, reason in _WITHOUT_MEANING.items() if self._num_stages > 1 else ():
            if Environment().bool(name):
                text = f"{name} is set in the environment and has no effect: {reason}."
                warnings.warn(text, OptionWarning, stacklevel=2)
        self._streams: StreamGroups | None = None
        if self._num_stages > 1:
            from fleet.strategies.pipeline.stage import StreamGroups

            self._streams = StreamGroups(job.axes, job.device)

    @property
    def _num_stages(self) -> int:
        return self.job.axes.size("pp")

    def check_model(self, model: nn.Module) -> None:
        """Raises ConfigError for a model that is not cut into the stages of this job."""
        if self._num_stages == 1 or (self.config.split and not isinstance(model, StagedLayers)):
            return
        if not isinstance(model, StagedLayers):
            raise ConfigError(
                f"hybrid_configs['pp_degree'] is {self._num_stages}, and {type(model).__name__} is not cut into "
                "stages. Make it a fleet.meta_parallel.PipelineLayer, or set pipeline_configs['split']."
            )
        if model.num_stages != self._num_stages:
            raise ConfigError(
                f"The PipelineLayer has {model.num_stages} stages and hybrid_configs['pp_degree'] is "
                f"{self._num_stages}. Create the model after fleet.init()."
            )

    def cut_model(self, model: nn.Module, loss_fn: Any) -> nn.Module:
        """Returns the stage of a plain ``model`` that ``pipeline_configs['split']`` cuts; any other model as it is."""
        if not self.config.split or isinstance(model, StagedLayers):
            return model
        from fleet.strategies.pipeline.split import AUTO, SplitLayers

        stages = self._num_stages
        starts = self.config.split if stages > 1 else AUTO
        made = SplitLayers(model, starts, stages, self.job.axes.rank("pp"), loss_fn)
        kept = set(made.parameters())
        self._dropped.update({p: True for p in model.parameters() if p not in kept})
        return made

    def wrap_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Returns ``optimizer`` without the parameters of other stages."""
        for group in optimizer.param_groups if self._dropped else ():
            group["params"][:] = [p for p in group["params"] if p not in self._dropped]
        return optimizer

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Returns ``model``, whose micro-batches now pass from stage to stage."""
        if self._streams is not None:
            from fleet.strategies.pipeline.stage import make_stage

            make_stage(cast(StagedLayers, model), self.job, self._streams, self.config)
        return model
