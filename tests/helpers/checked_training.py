"""Small jobs for the tests of what training checks: a network, its optimizer, a step, the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fleet as package
from fleet import fleet
from fleet.errors import ConfigError

OPTIONS: dict[str, dict[str, Any]] = {
    "data_parallel": {},
    "stage 1": {"sharding": True, "sharding_configs": {"stage": 1, "sharding_degree": 2}},
    "stage 2": {"sharding": True, "sharding_configs": {"stage": 2, "sharding_degree": 2}},
    "stage 3": {"sharding": True, "sharding_configs": {"stage": 3, "sharding_degree": 2}},
    "gradient_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "amp": {"amp": True, "amp_configs": {"dtype": "float16"}},
    "fp16_allreduce": {"fp16_allreduce": True},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 1}},
    "dgc": {"dgc": True, "dgc_configs": {"rampup_begin_step": 100}},
}
STEPS = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def start(options: Mapping[str, Any]) -> None:
    """Starts a job with ``options``."""
    strategy = package.DistributedStrategy()
    strategy.update(options)
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")


def job(options: Mapping[str, Any], net: nn.Module | None = None) -> tuple[Any, Any, Any, Any]:
    """Returns the module, its SGD, and both as fleet returns them."""
    start(options)
    net = net or network()
    raw = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return net, raw, fleet.distributed_optimizer(raw), fleet.distributed_model(net)


def step_once(model: Any, optimizer: Any, step: int) -> None:
    rank = fleet.worker_index()
    model(batch(step, rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def flat(state: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for _, value in sorted(state.items())])


def weights(model: Any) -> Tensor:
    return flat(model.full_state_dict())


def message(action: Callable[[], object]) -> str:
    """Returns the text of the ConfigError that ``action`` raises, or ``""``."""
    try:
        action()
    except ConfigError as error:
        return str(error)
    return ""
