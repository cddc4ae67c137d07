"""A marked method that steps an optimizer is an error."""

from __future__ import annotations

import pytest
from torch import nn

from fleet.errors import ConfigError
from fleet.training.fleet_model import FleetModel
from fleet.training.forward_guard import check_outside


def test_what_runs_inside_a_marked_method_is_named() -> None:
    model = FleetModel(net := nn.Linear(1, 1), net)
    check_outside([model], "optimizer.step()")
    model.__dict__["_redirected"] = "loss"
    with pytest.raises(ConfigError, match=r"model.loss\(\) was marked .* optimizer.step\(\)"):
        check_outside([model], "optimizer.step()")
