"""dgc: deep gradient compression; workers exchange only the largest entries of each gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleet.strategies._base import NOT_YET, Stage, Strategy
from fleet.strategies._config import Config, setting
from fleet.strategies._optimizer_kinds import check_momentum


@dataclass(frozen=True, kw_only=True)
class DgcConfig(Config, option="dgc_configs"):
    """How fast the exchange becomes sparse, and how sparse."""

    rampup_begin_step: int = setting(0, "first step that compresses; before it, plain momentum", at_least=0)
    rampup_step: int = setting(1, "steps over which the list of sparsities is walked through", at_least=1)
    sparsity: tuple[float, ...] = setting(
        [], "shares of entries that are not sent, one after the other; [] means [0.999]", at_least=0, below=1
    )


class Dgc(Strategy):
    """Sends the largest entries of each gradient and keeps the others for later steps."""

    name = "dgc"
    meaning = "Exchange only the largest entries of each gradient (Deep Gradient Compression); the rest waits its turn."
    stage = Stage.COMM
    Config = DgcConfig
    conflicts = {
        "fp16_allreduce": "dgc sends chosen entries as index and value, and leaves no float32 sum to narrow",
        "gradient_merge": "both hold gradients back for later steps, and nothing defines what is held back twice",
        "localsgd": "dgc compresses the exchange of gradients, and localsgd exchanges none",
        "adaptive_localsgd": "dgc compresses the exchange of gradients, and adaptive_localsgd exchanges none",
        "lars": "dgc applies momentum before the exchange, and lars scales gradients before momentum",
        "lamb": "dgc needs torch.optim.SGD with momentum, and lamb works on Adam",
    }
    refused = NOT_YET
    model_effect = "leaves large float32 gradients out of the common exchange"
    optimizer_effect = "adds up momentum and gradients locally, and exchanges only their largest entries"

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ConfigError unless the optimizer is SGD with momentum."""
        check_momentum(self.name, optimizer)
