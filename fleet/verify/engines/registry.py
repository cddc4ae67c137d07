"""The engines that ``python -m fleet verify`` knows."""

from __future__ import annotations

from fleet.verify.engines.accelerate_engine import AccelerateEngine
from fleet.verify.engines.fleet_engine import FleetEngine
from fleet.verify.engines.lightning_engine import LightningEngine
from fleet.verify.engines.torch_engine import TorchEngine
from fleet.verify.engines.training_engine import TrainingEngine
from fleet.verify.engines.transformers_engine import TransformersEngine

# Asked in this order: the first that runs a job describes it.
ENGINES: tuple[type[TrainingEngine], ...] = (
    FleetEngine,
    TransformersEngine,
    AccelerateEngine,
    LightningEngine,
    TorchEngine,
)
