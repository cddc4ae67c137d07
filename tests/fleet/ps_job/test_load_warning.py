"""A state that is loaded while the servers hold the parameters changes none, and the script hears of it."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn

import fleet
from fleet.errors import ConfigError, OptionWarning
from fleet.facade import Fleet


def test_the_scripts_own_module_says_that_it_loads_nothing_and_its_copies_load() -> None:
    own = Fleet()
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    own.init(strategy=strategy, log_level="ERROR")
    net = nn.Sequential(nn.Linear(2, 1))
    own.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1), strategy)
    model = own.distributed_model(net)
    own.init_worker()
    state = {name: torch.ones_like(value) for name, value in net.state_dict().items()}
    for one in (net, model):
        with pytest.warns(OptionWarning, match="the parameter servers hold the parameters"):
            one.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"assign=True\) would replace the parameters"):
            one.load_state_dict(state, assign=True)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for free in (copy.deepcopy(net), torch.load(file, weights_only=False)):
            free.load_state_dict(state)
            assert torch.equal(free[0].weight, torch.ones(1, 2))
        own.stop_worker()
        net.load_state_dict(state)
    own.session.close()
