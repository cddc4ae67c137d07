# Made by `make docs`; a change belongs into the code that it is made from.
"""Layers of experts: a gate sends each token to a few of many modules, which the workers of the ep axis share out.

Names are resolved at first use. ``fleet.incubate.distributed.models.moe`` is the same under Fleet's path.

Example:
    >>> strategy.hybrid_configs = {"sharding_degree": 2, "ep_degree": 2}
    >>> fleet.init(is_collective=True, strategy=strategy)
    >>> experts = [Mlp(512) for _ in range(4)]  # of this worker; the layer has 8
    >>> layer = fleet.moe.MoELayer(512, experts, gate={"type": "switch", "top_k": 1})
    >>> loss = criterion(model(x), y) + 0.01 * layer.gate.get_loss()
"""

from fleet.moe.expert_clip import ClipGradForMOEByGlobalNorm as ClipGradForMOEByGlobalNorm
from fleet.moe.gates import BaseGate as BaseGate
from fleet.moe.gates import GShardGate as GShardGate
from fleet.moe.gates import NaiveGate as NaiveGate
from fleet.moe.gates import SwitchGate as SwitchGate
from fleet.moe.moe_layer import MoELayer as MoELayer
from fleet.moe.token_exchange import global_gather as global_gather
from fleet.moe.token_exchange import global_scatter as global_scatter

__all__ = [
    "BaseGate",
    "ClipGradForMOEByGlobalNorm",
    "GShardGate",
    "MoELayer",
    "NaiveGate",
    "SwitchGate",
    "global_gather",
    "global_scatter",
]
