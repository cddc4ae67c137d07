# Made by `make docs`; a change belongs into the code that it is made from.
"""Layers of experts: a gate sends each token to a few of many modules, which the workers of the ep axis share out.

Names are resolved at first use. ``fleet.incubate.distributed.models.moe`` is the same under Fleet's path.

Example:
    >>> experts = [torch.nn.Linear(4, 4) for _ in range(3)]  # of this worker; the layer has ep_degree times as many
    >>> layer = fleet.moe.MoELayer(4, experts, gate={"type": "switch", "top_k": 1})
    >>> loss = layer(x).square().mean() + 0.01 * layer.gate.get_loss()
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
