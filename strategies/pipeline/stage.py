"""PipelineStage: what one worker needs to take part in a pipeline: links, shared layers and the gradient exchange."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fleet.env import Environment
from fleet.job.axes import COPY_AXES, Axes
from fleet.strategies._gradients.flat import broadcast_from_rank_0
from fleet.strategies._gradients.gradient_exchange import EXCHANGE, GradientExchange
from fleet.strategies._gradients.reducer import GradientReducer
from fleet.strategies._shared.experts import expert_names, is_expert
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.strategies.pipeline.order import StageStream
from fleet.strategies.pipeline.stage_run import StagePlace, make_links
from fleet.strategies.pipeline.ties import Ties

if TYPE_CHECKING:
    from fleet.job.job import Job

_STAGE = "fleet_stage"


class StreamGroups:
    """The process groups in which activations and gradients travel; every worker makes them at the same point.

    NCCL runs what a group has to do in the order in which it was asked. So activations and gradients have groups of
    their own, and so has each way around: with several chunks to a worker the last stage sends to the first, which
    asks for that before it sends anything itself. gloo tells streams of one group apart by their tags.
    """

    def __init__(self, axes: Axes, device: torch.device) -> None:
        self._groups = [axes.group("pp")] * 4
        if device.type == "cuda":
            pipes = axes.all_ranks("pp")
            for index in range(4):
                made = [dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s())) for ranks in pipes]
                self._groups[index] = made[pipes.index(axes.ranks("pp"))]

    def group_of(self, channel: StageStream) -> Any:
        """Returns the group of a stream."""
        return self._groups[2 * (channel.source > channel.target) + (channel.what == "b")]


def timeout_s() -> float:
    """Returns how long an exchange may take."""
    return Environment().float("PADDLE_PG_TIMEOUT") / 1000


@dataclass
class PipelineStage:
    """One worker's part of a pipeline that trains.

    Attributes:
        layers: the layers of this stage.
        place: where it stands.
        axes: the mesh.
        device: the device of this worker.
        ties: the layers that stages share.
        reducer: the exchange with the workers that hold the same stage.
        sends_headers: with each message, because shapes may change.
        pp_configs: the settings of the pipeline axis.
    """

    layers: StagedLayers
    place: StagePlace
    axes: Axes
    device: torch.device
    ties: Ties
    reducer: GradientReducer
    sends_headers: bool
    pp_configs: Any

    def __deepcopy__(self, memo: Any) -> PipelineStage:
        return self  # a copied model does not train, and asks for its place only

    @property
    def group(self) -> Any:
        """The process group of the stages of this pipeline."""
        return self.axes.group("pp")


def make_stage(layers: StagedLayers, job: Job, streams: StreamGroups, config: Any) -> PipelineStage:
    """Returns the stage of ``layers``, whose parameters are then equal where they must be; every worker calls it."""
    axes, options, ranks = job.axes, job.options, job.axes.ranks("pp")
    settings = options["hybrid_configs"].pp_configs
    place = StagePlace(layers.num_stages, layers.stage, layers.num_chunks, config.schedule_mode)
    make_links(place, ranks, streams.group_of, job.device)
    ties = Ties(layers, axes.all_ranks("pp"), axes.global_rank, axes.group("pp"), timeout_s())
    copies = axes.group(*COPY_AXES)
    if copies is not None:
        apart = set(expert_names(layers))
        named = [*layers.named_parameters(), *layers.named_buffers()]
        broadcast_from_rank_0([tensor.detach() for name, tensor in named if name not in apart], copies)
    ties.make_equal()
    fuses = options["fuse_all_reduce_ops"]
    averages = options["gradient_scale_configs"].scale_strategy == "avg"
    divisor = axes.data_replicas if averages else 1
    exchange = None if copies is None else GradientExchange("pipeline", copies, divisor)
    reducer = GradientReducer(
        [_parameters(layers.modules_of(chunk)) for chunk in range(layers.num_chunks)],
        exchange,
        bucket_bytes=options["fuse_grad_size_in_MB"] * 2**20 if fuses else 1,
        last_bucket_bytes=options["last_comm_group_size_MB"] * 2**20 if fuses else 1,
        overlaps=settings.dp_comm_overlap or settings.sharding_comm_overlap,
        finds_unused=options["find_unused_parameters"],
        late=ties.parameters(),
    )
    stage = PipelineStage(
        layers, place, axes, job.device, ties, reducer,
        sends_headers=settings.enable_dynamic_shape or not config.p2p_cache_shape, pp_configs=settings,
    )  # fmt: skip
    layers.__dict__.update({_STAGE: stage, EXCHANGE: exchange})
    return stage


def stage_of(layers: nn.Module) -> PipelineStage | None:
    """Returns the stage that was made of ``layers``, ``None`` without a pipeline."""
    found: PipelineStage | None = layers.__dict__.get(_STAGE)
    return found


def _parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    seen: dict[nn.Parameter, None] = {}
    for module in modules:
        seen.update(dict.fromkeys(p for p in module.parameters() if not is_expert(p)))
    return list(seen)
