"""tensor_parallel: the weights of large layers are divided among workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet.strategies._declare.fields import Config, setting
from fleet.strategies._declare.strategy import Stage, Strategy, Values, Workers, top_level
from fleet.strategies.tensor_parallel.place import RunningAxes
from fleet.strategies.tensor_parallel.streams import seed_streams


@dataclass(frozen=True, kw_only=True)
class TensorParallelConfig(Config, option="tensor_parallel_configs"):
    """How many workers share a layer, and their random numbers."""

    tensor_parallel_degree: int = setting(1, "workers that share the weights of a layer", at_least=1)
    tensor_init_seed: int = setting(
        -1, "seed of the shared layers; -1 takes that of rank 0: torch.manual_seed's, else a random one", at_least=-1
    )


@top_level
@dataclass(frozen=True, kw_only=True)
class TensorParallelSettings(Config, owner="tensor_parallel"):
    """Which parameters the workers of a layer keep equal."""

    sync_param_name: tuple[str, ...] = setting(
        ["embedding", "layer_norm", ".b_"],
        "parameters whose names contain one of these are kept equal when hybrid_configs['mp_configs'] asks for it",
    )


class TensorParallel(Strategy):
    """Divides the weights of layers among workers."""

    name = "tensor_parallel"
    meaning = "Divide the weights of large layers among workers."
    stage = Stage.MODULE
    Config = TensorParallelConfig
    conflicts = {
        "localsgd": "localsgd averages whole models, and these workers hold different parts of one",
        "adaptive_localsgd": "adaptive_localsgd averages whole models, and these workers hold different parts of one",
        "dgc": "dgc exchanges gradients of whole models, and these workers hold different parts of one",
    }
    model_effect = "keeps this worker's part of each divided layer"

    def __init__(self, config: Any, session: Workers) -> None:
        """Tells layers which workers share them, and seeds the random streams."""
        super().__init__(config, session)
        self._axes = session.axes
        if session.axes.size("mp") > 1:
            RunningAxes.axes = session.axes
            seed_streams(None if config.tensor_init_seed < 0 else config.tensor_init_seed, session.axes, session.device)

    def close(self) -> None:
        """Forgets the workers: layers that are made afterwards are whole."""
        if RunningAxes.axes is self._axes:
            RunningAxes.axes = None

    @classmethod
    def chosen(cls, options: Values) -> bool:
        """Returns whether the switch is on or a tensor-parallel degree is above 1."""
        return bool(options["tensor_parallel"] or options["hybrid_configs"].mp_degree > 1)
