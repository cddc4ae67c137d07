"""Which optimizers the strategies accept (A.5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fleet.errors import ConfigError
from fleet.strategies import REGISTRY

PARAMETERS = [torch.nn.Parameter(torch.zeros(2))]


def check(name: str, optimizer: torch.optim.Optimizer) -> None:
    session: Any = None
    config = REGISTRY[name].Config
    REGISTRY[name](config() if config else None, session).check_optimizer(optimizer)


SGD = torch.optim.SGD(PARAMETERS, lr=0.1)
MOMENTUM = torch.optim.SGD(PARAMETERS, lr=0.1, momentum=0.9)
NESTEROV = torch.optim.SGD(PARAMETERS, lr=0.1, momentum=0.9, nesterov=True)
ADAM = torch.optim.Adam(PARAMETERS)
ADAMW = torch.optim.AdamW(PARAMETERS)
AMSGRAD = torch.optim.Adam(PARAMETERS, amsgrad=True)
TWO_GROUPS = torch.optim.SGD([{"params": PARAMETERS, "momentum": 0.9}], lr=0.1)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("lars", MOMENTUM), ("lars", TWO_GROUPS), ("dgc", MOMENTUM), ("dgc", NESTEROV), ("lamb", ADAM),
     ("localsgd", SGD), ("localsgd", MOMENTUM), ("adaptive_localsgd", SGD)],
)  # fmt: skip
def test_accepted(name: str, optimizer: torch.optim.Optimizer) -> None:
    """A.5: Momentum for lars and dgc, Adam for lamb, SGD or Momentum for localsgd."""
    check(name, optimizer)


@pytest.mark.parametrize(
    ("name", "optimizer", "rule"),
    [("lars", ADAM, "needs torch.optim.SGD with momentum, got Adam"), ("lars", SGD, "momentum=0"),
     ("lars", NESTEROV, "no nesterov"), ("dgc", ADAM, "got Adam"), ("dgc", SGD, "momentum=0"),
     ("lamb", SGD, "needs torch.optim.Adam, got SGD"), ("lamb", ADAMW, "got AdamW"), ("lamb", AMSGRAD, "no amsgrad"),
     ("localsgd", ADAM, "got Adam"), ("adaptive_localsgd", ADAM, "got Adam")],
)  # fmt: skip
def test_refused(name: str, optimizer: torch.optim.Optimizer, rule: str) -> None:
    """A.5: another optimizer is an error that says which one to pass; Paddle turns the option off without a word."""
    with pytest.raises(ConfigError, match=f"^{name} .*{rule}.*turn {name} off"):
        check(name, optimizer)
