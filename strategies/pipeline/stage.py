"""PipelineStage: one worker's place in a pipeline, with links, shared layers and the gradient exchange.

Parameters that several stages hold are one parameter: equal at the start, with the sum of all gradients (``Ties``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleet.env import Environment
from fleet.job.axes import COPY_AXES, Axes
from fleet.strategies._gradients.flat import average, broadcast_from_rank_0, chunks
from fleet.strategies._gradients.gradient_exchange import EXCHANGE, GradientExchange
from fleet.strategies._gradients.reducer import Bucket, GradientReducer
from fleet.strategies._shared.experts import expert_names, is_expert
from fleet.strategies.pipeline.descriptions import StagedLayers
from fleet.strategies.pipeline.order import StageStream
from fleet.strategies.pipeline.stage_run import StagePlace, make_links

if TYPE_CHECKING:
    from fleet.job.job import Job


class Ties:
    """The shared layers of one model, on this worker.

    Every worker makes it at the same point: process groups are made here.

    Args:
        layers: the layers of this stage.
        pipes: the global ranks of the stages, for every pipeline of the job.
        rank: the global rank of this worker.
        whole: the process group of this worker's whole pipeline.
        timeout_s: how long an exchange may take.
    """

    def __init__(
        self, layers: StagedLayers, pipes: Sequence[Sequence[int]], rank: int, whole: Any, timeout_s: float
    ) -> None:
        self._groups: dict[str, Any] = {}
        self._layers = layers
        made: dict[tuple[int, ...], Any] = {tuple(range(layers.num_stages)): whole}
        for key, stages in layers.ties.items():
            members = tuple(sorted(stages))
            if members not in made:
                # Every worker makes the groups of all pipelines: torch wants the call from all, members or not.
                lists = [[pipe[stage] for stage in members] for pipe in pipes]
                made[members] = None
                for ranks in lists:
                    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
                    made[members] = group if rank in ranks else made[members]
            if layers.holds(key):
                self._groups[key] = made[members]

    def parameters(self) -> list[list[nn.Parameter]]:
        """Returns the shared parameters on this stage, one list for each key."""
        return [self._layers.tied_parameters(key) for key in self._groups]

    def make_equal(self) -> None:
        """Gives every stage the values of the first stage that holds a layer, its buffers included."""
        for key, group in self._groups.items():
            parameters = [p.data for p in self._layers.tied_parameters(key)]
            broadcast_from_rank_0(parameters + self._layers.tied_buffers(key), group)

    def sum_gradients(self) -> None:
        """Replaces the gradient of each shared parameter by the sum over stages; one without counts as zero.

        A parameter that no stage used keeps no gradient.
        """
        for key, group in self._groups.items():
            trained = [p for p in self._layers.tied_parameters(key) if p.requires_grad]
            exchange = GradientExchange("pipeline tied parameters", group, 1)
            for number, parameters in enumerate(chunks(trained)):
                bucket = Bucket(parameters)
                bucket.send(exchange, number, finds_unused=True)
                bucket.finish()

    def synchronize(self, mode: str, tensors_of: Any) -> None:
        """Makes ``tensors_of(parameter)`` equal on all stages that share it: the owner's, or the mean of all."""
        for key, group in self._groups.items():
            tensors: list[Tensor] = [t for p in self._layers.tied_parameters(key) for t in tensors_of(p)]
            floating = [t for t in tensors if t.is_floating_point()]
            if mode == "average":
                average(floating, group)
            else:
                broadcast_from_rank_0(floating, group)


_STAGE = "fleet_stage"


class StreamGroups:
    """The process groups in which activations and gradients travel; every worker makes them at the same point.

    NCCL runs the operations of a group in the order of the calls. So activations and gradients have separate groups,
    and so has each direction: with several chunks to a worker the last stage sends to the first, which asks for that
    before it sends anything itself. gloo tells streams of one group apart by their tags.
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
        place: its number, its order and its links.
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
    axes = job.axes
    options = job.options
    ranks = job.axes.ranks("pp")
    settings = options["hybrid_configs"].pp_configs
    place = StagePlace(layers.num_stages, layers.stage, layers.num_chunks, config.schedule_mode)
    make_links(place, ranks, streams.group_of, job.device)
    ties = Ties(layers, axes.all_ranks("pp"), axes.global_rank, axes.group("pp"), timeout_s())
    copies = axes.group(*COPY_AXES)
    # Copies first, ties second: the owner of a tie then gives all stages of every pipeline the same values. Experts
    # differ between these workers.
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
        late=ties.parameters(),  # complete only after the sum over stages
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
