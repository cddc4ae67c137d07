"""sharding: each worker keeps a part of the optimizer state, the gradients and the parameters (ZeRO)."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.errors import ConfigError
from fleet.strategies._base import NOT_YET, Stage, Strategy, Values
from fleet.strategies._config import Config, setting
from fleet.strategies._degrees import plan_degrees

_NO_PROGRAM = "it rewrites a static program, and torch runs none"


@dataclass(frozen=True, kw_only=True)
class ShardingConfig(Config, option="sharding_configs"):
    """What is divided, among how many workers, and in which units."""

    sharding_degree: int = setting(8, "workers that share one copy of the state", at_least=1)
    mp_degree: int = setting(1, "workers that share the weights of a layer", at_least=1, refused=NOT_YET)
    pp_degree: int = setting(1, "stages of the pipeline", at_least=1, refused=NOT_YET)
    dp_degree: int = setting(1, "copies of the sharded model", at_least=1)
    stage: int = setting(
        1, "1 divides the optimizer state, 2 the gradients too, 3 the parameters too", choices=(1, 2, 3)
    )
    sharding_segment_strategy: str = setting(
        "segment_broadcast_MB",
        "how the model is cut into units: by size, or at named modules",
        choices=("segment_broadcast_MB", "segment_anchors"),
    )
    segment_broadcast_MB: float = setting(32.0, "size in MiB of a unit that is gathered at once", above=0)
    segment_anchors: tuple[str, ...] = setting([], "qualified names of the modules that are units")
    gradient_merge_acc_step: int = setting(1, "batches per update, as gradient_merge has k_steps", at_least=1)
    hybrid_dp: bool = setting(
        False, "data parallelism around the shards", no_meaning="it is the old name of dp_degree > 1; set dp_degree"
    )
    optimize_offload: bool = setting(False, "keep the optimizer state in host memory")
    optimize_cast: bool = setting(False, "keep casts on the optimizer's side", no_meaning=_NO_PROGRAM)
    pp_allreduce_in_optimize: bool = setting(
        False, "exchange gradients once per step and not once per micro-batch", refused=NOT_YET
    )
    _dp_as_optimizer_sharding: bool = setting(False, "internal switch of Paddle", no_meaning=_NO_PROGRAM)
    enable_tuning: bool = setting(False, "internal switch of Paddle's tuner", no_meaning=_NO_PROGRAM)
    use_calc_stream: bool = setting(False, "communicate on the compute stream", no_meaning=_NO_PROGRAM)


class Sharding(Strategy):
    """Divides optimizer state, gradients and parameters among workers."""

    name = "sharding"
    meaning = "Divide optimizer state, gradients and parameters among workers (ZeRO stages 1, 2 and 3)."
    stage = Stage.SHARD
    Config = ShardingConfig
    after = ("pipeline",)
    replaces = ("data_parallel",)
    conflicts = {
        "gradient_merge": "sharding adds up batches by itself; set sharding_configs['gradient_merge_acc_step'] instead",
        "localsgd": "localsgd averages whole models, and a sharded worker holds a part of one",
        "adaptive_localsgd": "adaptive_localsgd averages whole models, and a sharded worker holds a part of one",
        "dgc": "dgc needs every worker's whole gradient, and a sharded worker holds a part of it",
        "fp16_allreduce": "sharding reduces gradients to their owners and sums none over all workers",
        "use_hierarchical_allreduce": "sharding reduces gradients to their owners and sums none over all workers",
    }
    in_place = True
    refused = NOT_YET
    model_effect = "divides what sharding_configs['stage'] says among the workers of the sharding axis"
    optimizer_effect = "updates only the part that this worker owns"

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether the switch is on or a sharding degree is above 1."""
        return bool(options["sharding"] or options["hybrid_configs"].sharding_degree > 1)

    @classmethod
    def problem(cls, options: Values, world_size: int) -> str | None:
        """Returns the reason when the degrees of ``sharding_configs`` do not fit together or the number of workers.

        When only ``hybrid_configs`` asks for sharding, its own check of the degrees applies.
        """
        if not options["sharding"]:
            return None
        config: ShardingConfig = options["sharding_configs"]
        degrees = {
            "sharding": config.sharding_degree, "mp": config.mp_degree, "pp": config.pp_degree, "dp": config.dp_degree,
        }  # fmt: skip
        hybrid = options["hybrid_configs"].sharding_degree
        if hybrid not in (1, config.sharding_degree):
            return (
                f"sharding_configs['sharding_degree'] is {config.sharding_degree} and "
                f"hybrid_configs['sharding_degree'] is {hybrid}. Set both to the same number, or turn sharding off."
            )
        if config.pp_degree > 1 and not options["pipeline"]:
            return (
                f"sharding_configs['pp_degree'] is {config.pp_degree} while 'pipeline' is off. "
                f"Turn pipeline on, or set pp_degree to 1."
            )
        if config.dp_degree > 1 and config.sharding_degree == 1:
            return (
                f"sharding_configs['dp_degree'] is {config.dp_degree} and ['sharding_degree'] is 1, which divides "
                f"nothing. Set sharding_degree, or turn sharding off: plain data parallelism needs no option."
            )
        try:
            plan_degrees("sharding_configs", degrees, world_size)
        except ConfigError as error:
            return str(error)
        return None

    @classmethod
    def notes(cls, options: Values, world_size: int) -> tuple[str, ...]:
        """Returns the remark that one worker has nobody to divide with."""
        return ("sharding changes nothing with one worker: it keeps everything.",) if world_size == 1 else ()
