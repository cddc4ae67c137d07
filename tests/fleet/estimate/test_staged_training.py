"""The memory of a worker with a part of the model, against real runs of two workers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fleet
from fleet.errors import ConfigError
from fleet.meta_parallel import ColumnParallelLinear, LayerDesc, PipelineLayer, RowParallelLinear
from tests.helpers.workers import run_workers

WIDTH, ROWS, MICRO = 256, 512, 4


class Block(nn.Module):
    """A divided block with activations of several widths."""

    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        """Adds what the block computes."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def layers() -> list[Any]:
    """Returns six blocks."""
    return [LayerDesc(Block) for _ in range(6)]


def sequential() -> nn.Module:
    """Returns the same as one module."""
    return nn.Sequential(*(Block() for _ in range(6)))


def strategy_of(degrees: dict[str, int]) -> fleet.DistributedStrategy:
    """Returns the options of a mesh, four micro-batches a step."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": size for axis, size in degrees.items()}
    strategy.pipeline_configs = {"accumulate_steps": MICRO, "micro_batch_size": ROWS // MICRO}
    return strategy


def mean_loss(output: Tensor, label: Any) -> Tensor:
    """Returns a loss that needs no label."""
    return output.mean()


def train(degrees: dict[str, int]) -> None:
    """Makes two steps."""
    fleet.init(is_collective=True, strategy=strategy_of(degrees), log_level="ERROR")
    net: Any = (
        PipelineLayer(layers(), loss_fn=mean_loss) if "pp" in degrees else nn.Sequential(*(Block() for _ in range(6)))
    )
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters()))
    model: Any = fleet.distributed_model(net)
    for _ in range(2):
        rows = torch.zeros(ROWS, WIDTH)
        if "pp" in degrees:
            model.train_batch([rows, torch.zeros(ROWS, 1)], optimizer)
        else:
            loss = model(rows).mean()
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        del rows


def measured(rank: int, world_size: int, degrees: dict[str, int]) -> int:
    """Returns the most that torch's allocator had handed out."""
    return peak_of(lambda: train(degrees))


def peak_of(work: Callable[[], object]) -> int:
    """Returns the most that torch's allocator had handed out at one time during ``work``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max(int(event["args"]["Total Allocated"]) for event in events if event.get("name") == "[memory]")


@pytest.mark.parametrize("degrees", [{"mp": 2}, {"pp": 2}], ids=["mp 2", "pp 2"])
def test_within_15_percent(degrees: dict[str, int]) -> None:
    """Parameters, gradients, state, and activations of min(p - s, n) micro-batches."""
    model: Any = layers() if "pp" in degrees else sequential
    found = fleet.estimate_memory(model, (ROWS, WIDTH), strategy_of(degrees), optimizer="adam", world_size=2)
    real = max(run_workers(measured, 2, degrees, backend=None))
    print(degrees, found.total_bytes, real, found.total_bytes / real - 1)
    assert abs(found.total_bytes / real - 1) < 0.15, f"{found}\n{real}"
    whole = 6 * (8 * WIDTH * WIDTH + 5 * WIDTH) * 4
    assert found.parameters_bytes == pytest.approx(whole / 2, rel=0.01)


def test_what_is_said() -> None:
    """A model without divided layers is counted whole, and a pipeline needs a list."""
    found = fleet.estimate_memory(nn.Linear(8, 8), (4, 8), strategy_of({"mp": 2}), world_size=2)
    assert any("counted whole" in remark for remark in found.not_modelled)
    with pytest.raises(ConfigError, match="PipelineLayer, the list"):
        fleet.estimate_memory(nn.Linear(8, 8), (4, 8), strategy_of({"pp": 2}), world_size=2)
    with pytest.raises(ConfigError, match="rows"):
        fleet.estimate_memory([nn.Linear(8, 8), nn.Linear(8, 8)], (5, 8), strategy_of({"pp": 2}), world_size=2)
    both = fleet.estimate_memory(
        lambda: PipelineLayer(layers()), (ROWS, WIDTH), strategy_of({"pp": 2, "mp": 2}), world_size=4
    )
    assert "stage 0" in "".join(both.not_modelled)
