"""pipeline: the layers are divided among workers, and micro-batches flow through them."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import Stage, Strategy, Values


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Config, option="pipeline_configs"):
    """How a batch is cut, and in which order its parts run."""

    micro_batch_size: int = setting(1, "samples per micro-batch", at_least=1)
    accumulate_steps: int = setting(1, "micro-batches per step; times micro_batch_size, the batch", at_least=1)
    schedule_mode: str = setting(
        "1F1B",
        "'1F1B' starts backward as early as it can and keeps fewer activations; 'F-then-B' runs all forwards first",
        choices=("1F1B", "F-then-B"),
    )
    p2p_cache_shape: bool = setting(
        True,
        "exchange the shapes of activations once",
        refused="torch's pipeline schedules need the same shapes at every step; leave it True",
    )
    enable_partial_send_recv: bool = setting(
        True,
        "with tensor parallelism, send a part of each activation and gather it on the other side",
        no_meaning="torch sends whole activations; only bandwidth differs",
    )


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

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether the switch is on or a pipeline degree is above 1."""
        return bool(options["pipeline"] or options["hybrid_configs"].pp_degree > 1)

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when gradients are to be summed, which a pipeline does not define."""
        scale = options["gradient_scale_configs"].scale_strategy
        if scale == "avg":
            return None
        return (
            f"gradient_scale_configs['scale_strategy'] is {scale!r}; with 'pipeline' it must be 'avg'. "
            f"Set it to 'avg', or turn pipeline off."
        )
