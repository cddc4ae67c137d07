"""``fleet.moe`` under Fleet's path.

Example:
    >>> from fleet.incubate.distributed.models.moe import MoELayer
"""

from fleet.moe.expert_clip import ClipGradForMOEByGlobalNorm
from fleet.moe.gates import BaseGate, GShardGate, NaiveGate, SwitchGate
from fleet.moe.moe_layer import MoELayer

__all__ = ["BaseGate", "ClipGradForMOEByGlobalNorm", "GShardGate", "MoELayer", "NaiveGate", "SwitchGate"]
