"""Hybrid meshes against what Paddle 3.3.1 computed (tests/data/README.md): losses and weights of 6 AdamW steps."""

from __future__ import annotations

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleet import fleet
from fleet.strategies._shared.parameter_layout import layouts_in
from tests.helpers.meshes import head_of, joined, parts_of
from tests.helpers.workers import run_workers

DATA = Path(__file__).parents[1] / "data" / "hybrid"
CASES = sorted(path.stem for path in DATA.glob("*.npz") if path.stem != "inputs")
AXES = {"dp": "dp", "mp": "mp", "pp": "pp", "sh": "sharding"}


@cache
def inputs() -> dict[str, Any]:
    """Returns the recorded data and starting weights."""
    with np.load(DATA / "inputs.npz") as found:
        return {name: torch.from_numpy(found[name]) for name in found.files}


class Residual(nn.Module):
    """x + down(gelu(up(norm(x))))."""

    def __init__(self) -> None:
        super().__init__()
        from fleet import meta_parallel as mpu

        self.norm = nn.LayerNorm(8)
        self.up = mpu.ColumnParallelLinear(8, 16, has_bias=True, gather_output=False)
        self.down = mpu.RowParallelLinear(16, 8, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, tokens, 8]."""
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


def recorded_name(name: str) -> str:
    """Returns the recorded name of a parameter of the PipelineLayer."""
    if name.startswith("shared_layers") or name == "0.weight":
        return "emb.weight"
    place, _, rest = name.partition(".")
    return "head.weight" if place == "4" else f"b{int(place) - 1}.{rest}"


def in_torch(name: str, value: Tensor) -> Tensor:
    """Returns a recorded tensor in torch's layout: Paddle's linear weights are [in, out]."""
    return value.T if re.search(r"(up|down|head)\.weight", name) else value


def clip(model: nn.Module, *_: Any) -> None:
    """Clips as torch's users do, before the step."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def train(rank: int, world_size: int, case: str) -> dict[str, Any]:
    """Trains one recorded case; a worker function."""
    from fleet import meta_parallel as mpu

    degrees = {AXES[axis]: int(size) for axis, size in re.findall(r"(dp|mp|pp|sh)(\d)", case)}
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": degree for axis, degree in degrees.items()}
    strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    tied = "tied" in case
    if tied:
        first = mpu.SharedLayerDesc("emb", mpu.VocabParallelEmbedding, None, "weight", 16, 8)
        last = mpu.SharedLayerDesc("emb", mpu.VocabParallelEmbedding, head_of, "weight", 16, 8)
    else:
        first = mpu.LayerDesc(mpu.VocabParallelEmbedding, 16, 8)
        last = mpu.LayerDesc(mpu.ColumnParallelLinear, 8, 16, has_bias=False)
    layers = [first, *[mpu.LayerDesc(Residual) for _ in range(3)], last]

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    topology = fleet.get_hybrid_communicate_group().topology()
    model = mpu.PipelineLayer(layers, topology=topology, loss_fn=loss_fn)
    layouts = layouts_in(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = in_torch(recorded_name(name), inputs()[f"full.{recorded_name(name)}"])
            parameter.copy_(layouts[name].part(whole) if name in layouts else whole)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)
    if "clip" in case:
        optimizer.register_step_pre_hook(partial(clip, model))
    wrapped, stepper = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
    found: dict[str, Any] = {"losses": [], "after": [], "row": fleet.data_rank()}
    for step in range(6):
        rows = [inputs()[name][step, fleet.data_rank()] for name in ("X", "Y")]
        found["losses"].append(float(wrapped.train_batch(rows, stepper)))
        found["after"].append(parts_of(model, dict(model.named_parameters())))
    return found


@pytest.mark.parametrize("case", CASES)
def test_recorded_mesh(case: str) -> None:
    """Section 17: within 2e-6 of the recording; the loss of each replica, and whole weights after every step."""
    with np.load(DATA / f"{case}.npz") as file:
        recorded = {name: torch.from_numpy(file[name]) for name in file.files if file[name].dtype.kind == "f"}
    world_size = 1
    for size in re.findall(r"(?:dp|mp|pp|sh)(\d)", case):
        world_size *= int(size)
    found = run_workers(train, world_size, case, backend=None)
    for worker in found:
        torch.testing.assert_close(torch.tensor(worker["losses"]), recorded["losses"][worker["row"]], rtol=0, atol=2e-6)
    for step in range(6):
        whole = joined([worker["after"][step] for worker in found])
        assert {recorded_name(name) for name in whole} == {n.removeprefix("after.") for n in recorded if n != "losses"}
        for name, weight in whole.items():
            expected = in_torch(recorded_name(name), recorded[f"after.{recorded_name(name)}"][step])
            torch.testing.assert_close(weight, expected, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
