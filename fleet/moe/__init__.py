"""Layers of experts: a gate sends each token to a few of many modules, which the workers of the ep axis share out.

Names are resolved at first use. ``fleet.incubate.distributed.models.moe`` is the same under Fleet's path.

Example:
    >>> experts = [torch.nn.Linear(4, 4) for _ in range(3)]  # of this worker; the layer has ep_degree times as many
    >>> layer = fleet.moe.MoELayer(4, experts, gate={"type": "switch", "top_k": 1})
    >>> loss = layer(x).square().mean() + 0.01 * layer.gate.get_loss()
"""

from __future__ import annotations

from fleet.common.lazy_names import lazy_names

_HOMES = {
    "BaseGate": "fleet.moe.gates",
    "ClipGradForMOEByGlobalNorm": "fleet.moe.expert_clip",
    "GShardGate": "fleet.moe.gates",
    "MoELayer": "fleet.moe.moe_layer",
    "NaiveGate": "fleet.moe.gates",
    "SwitchGate": "fleet.moe.gates",
    "global_gather": "fleet.moe.token_exchange",
    "global_scatter": "fleet.moe.token_exchange",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
