"""Optimizers with the constructors of Fleet scripts, for scripts that are ported line by line.

Each computes Paddle's numbers. Where torch has the same rule, the constructor returns torch's optimizer. Paddle's
rules for RMSProp, Adamax and ASGD differ from torch's; they are implemented here. ``grad_clip`` and
``weight_decay=L1Decay(...)`` act at each update, in Fleet's order: clip, then decay, then the rule.

``parameters`` takes groups in Paddle's form: in ``{"params": [...], "learning_rate": 0.1, "weight_decay": 0.0}`` the
learning rate multiplies the optimizer's, and the decay replaces the optimizer's.

Example:
    >>> momentum = fleet.optimizer.Momentum(0.1, 0.9, net.parameters(), weight_decay=fleet.regularizer.L2Decay(1e-4))
"""

from __future__ import annotations

from fleet.optimizer.constructors import (
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Lamb,
    Momentum,
    Muon,
    NAdam,
    RAdam,
    Rprop,
)
from fleet.optimizer.paddle_rules import ASGD, Adamax, RMSProp

__all__ = [
    "ASGD",
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lamb",
    "Momentum",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSProp",
    "Rprop",
]
