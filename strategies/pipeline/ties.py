"""Ties: parameters that several stages hold are one parameter: equal at the start, with the sum of all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fleet.strategies._gradients.flat import average, broadcast_from_rank_0, chunks
from fleet.strategies._gradients.gradient_exchange import GradientExchange
from fleet.strategies._gradients.reducer import Bucket
from fleet.strategies.pipeline.descriptions import StagedLayers


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
