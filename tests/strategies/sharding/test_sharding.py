"""sharding: every stage trains as plain data parallelism does, with less memory on each worker."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.strategies._shared.parts import local
from tests.fleet.test_recorded_results import recorded_net
from tests.helpers.workers import run_workers

DATA = Path(__file__).parents[2] / "data" / "collective"
TOLERANCE = 1e-6
STEPS = 4
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 0.01}),
    "adamw": ("AdamW", {"lr": 0.01, "weight_decay": 0.05}),
}


def options(degree: int = 2, **configs: Any) -> fleet.DistributedStrategy:
    """Returns a strategy with sharding on."""
    strategy = fleet.DistributedStrategy()
    strategy.sharding = True
    strategy.sharding_configs = {"sharding_degree": degree, **configs}
    return strategy


class Net(nn.Module):
    """Blocks with batch norm, a frozen layer, and sizes that two and four workers do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)  # under batch norm a bias has gradient 0 and noise
        self.norm = nn.BatchNorm1d(7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns scores [batch, 3]."""
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.frozen(x))  # type: ignore[no-any-return]


def net_of(seed: int) -> Net:
    """Returns the net with the weights of ``seed``."""
    torch.manual_seed(seed)
    return Net()


def batch(step: int, rank: int) -> torch.Tensor:
    """Returns the data of one worker at one step."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    optimizer_name: str, rank: int, *, model_first: bool = True, clip: float | None = None, decay: float = 1.0
) -> dict[str, Any]:
    """Trains in the session that runs; returns the whole state, the norms before clipping, and the losses."""
    kind, settings = OPTIMIZERS[optimizer_name]
    net = net_of(rank)  # rank 0's weights must win
    raw = getattr(torch.optim, kind)([p for p in net.parameters() if p.requires_grad], **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(raw, decay)
    if model_first:
        model = fleet.distributed_model(net)
        optimizer = fleet.distributed_optimizer(raw)
    else:
        optimizer = fleet.distributed_optimizer(raw)
        model = fleet.distributed_model(net)
    norms, losses = [], []
    for step in range(STEPS):
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return {"state": model.full_state_dict(), "norms": norms, "losses": losses, "bytes": bytes_held(model, optimizer)}


def bytes_held(model: Any, optimizer: Any) -> dict[str, int]:
    """Returns what this worker holds of the trainable parameters, and of the optimizer's state."""
    state = [v for entry in optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor) and v.dim()]
    return {
        "parameters": sum(local(p).untyped_storage().nbytes() for p in model.parameters() if p.requires_grad),
        "state": sum(local(v).untyped_storage().nbytes() for v in state),
    }


def train_all(rank: int, world_size: int, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Trains every case (optimizer, sharding_configs, arguments of train), each beside plain data parallelism."""
    found = []
    plain: dict[str, Any] = {}
    for name, configs, arguments in cases:
        key = repr((name, {k: v for k, v in arguments.items() if k != "model_first"}))
        if key not in plain:
            fleet.init(is_collective=True)
            plain[key] = train(name, rank, **arguments)
        fleet.init(is_collective=True, strategy=options(world_size, **configs))
        sharded = train(name, rank, **arguments)
        found.append((plain[key], sharded))
    return found


def check_same(plain: dict[str, Any], sharded: dict[str, Any], label: str) -> None:
    """Checks that two runs had the same losses, norms and state."""
    assert sharded["losses"] == pytest.approx(plain["losses"], abs=TOLERANCE), label
    assert sharded["norms"] == pytest.approx(plain["norms"], rel=1e-5), label
    assert list(sharded["state"]) == list(plain["state"]), label
    for name, value in plain["state"].items():
        torch.testing.assert_close(sharded["state"][name], value, atol=TOLERANCE, rtol=0, msg=f"{label}: {name}")


STAGES: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "segment_broadcast_MB": 0.0003},
    {
        "stage": 3,
        "sharding_segment_strategy": "segment_anchors",
        "segment_anchors": ["first", "blocks.0", "blocks.1", "last"],
    },
]


def test_every_stage_equals_data_parallel() -> None:
    """A.2 sharding_configs, A.10: three optimizers, every stage, units by size and by name, within 1e-6."""
    cases: list[Any] = [(name, configs, {}) for name in OPTIMIZERS for configs in STAGES[:3]]
    cases += [("adam", configs, {}) for configs in STAGES[3:]]
    for results in run_workers(train_all, 2, cases, backend=None):
        for (name, configs, _), (plain, sharded) in zip(cases, results, strict=True):
            check_same(plain, sharded, f"{name} {configs}")


def test_order_of_calls_schedulers_and_clipping() -> None:
    """Issue: either call first, a scheduler on the raw optimizer, clipping by the global norm (A.9)."""
    arguments = [
        {"model_first": first, "clip": clip, "decay": 0.7}
        for first, clip in itertools.product((True, False), (0.05, 9.0))
    ]
    cases = [("adamw", {"stage": stage}, case) for stage in (1, 2, 3) for case in arguments]
    for results in run_workers(train_all, 2, cases, backend=None):
        for (_, configs, case), (plain, sharded) in zip(cases, results, strict=True):
            check_same(plain, sharded, f"{configs} {case}")
            assert len(sharded["norms"]) == STEPS
        assert results[0][0]["norms"][0] > 0.05  # so that clipping does something


def test_memory_falls_as_expected() -> None:
    """Issue: parameters and state by the bytes this worker holds, at most one row of each parameter above its share."""
    cases: list[Any] = [("adam", {"stage": stage}, {}) for stage in (1, 2, 3)]
    results = run_workers(train_all, 2, cases, backend=None)
    for results_of_rank in results:
        plain = results_of_rank[0][0]["bytes"]
        rows = 4 * sum(p[0].numel() for p in net_of(0).parameters() if p.requires_grad)
        for (_, configs, _), (_, sharded) in zip(cases, results_of_rank, strict=True):
            if configs["stage"] < 3:
                assert sharded["bytes"]["parameters"] == plain["parameters"]
            else:
                assert sharded["bytes"]["parameters"] <= plain["parameters"] / 2 + rows
            assert sharded["bytes"]["state"] <= plain["state"] / 2 + 2 * rows, configs
    whole = results[0][0][1]["bytes"]["state"] + results[1][0][1]["bytes"]["state"]
    assert whole == results[0][0][0]["bytes"]["state"]  # stage 1: every state has one owner


def four(rank: int, world_size: int) -> list[Any]:
    """Trains on a grid of 2 copies and 2 parts; both layouts of the ranks, plain data parallelism beside them."""
    found = []
    fleet.init(is_collective=True)
    plain = train("adam", rank, clip=0.05)
    for stage, order in ((1, None), (2, None), (3, None), (3, ["sharding", "dp", "pp", "sep", "cp", "mp"])):
        strategy = options(2, stage=stage, dp_degree=2)
        if order is not None:
            strategy.hybrid_parallel_order = order
        fleet.init(is_collective=True, strategy=strategy)
        result = train("adam", rank, clip=0.05)
        group = fleet.get_hybrid_communicate_group()
        ranks = (group.ranks("data"), group.ranks("sharding"))
        torch_ranks = tuple(
            torch.distributed.get_process_group_ranks(g)
            for g in (group.get_data_parallel_group(), group.get_sharding_parallel_group())
        )
        found.append((plain, result, ranks, torch_ranks, group.get_sharding_parallel_rank(), group.get_parallel_mode()))
    strategy = fleet.DistributedStrategy()  # by degrees alone, with parts of tensors
    strategy.hybrid_configs = {"sharding_degree": 2, "sharding_configs": {"split_param": True, "use_reduce_avg": False}}
    fleet.init(is_collective=True, strategy=strategy)
    found.append((plain, train("adam", rank, clip=0.05), None, None, None, None))
    alone = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    assert torch.distributed.get_process_group_ranks(alone) == [rank]
    torch.distributed.barrier()  # worker 0 has the store, which a new group of each worker needs
    return found


def test_copies_of_parts() -> None:
    """A.10 dp x sharding, G9, G10: 2 x 2 workers equal 4 of data parallelism, in both layouts of the ranks."""
    for rank, results in enumerate(run_workers(four, 4, backend=None)):
        for place, (plain, sharded, ranks, torch_ranks, sharding_rank, mode) in enumerate(results):
            check_same(plain, sharded, f"case {place}")
            if ranks is None:
                continue
            inner, outer = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
            expected = (outer, inner) if place < 3 else (inner, outer)
            assert (ranks, torch_ranks) == (expected, expected)
            assert sharding_rank == expected[1].index(rank)
            assert mode == fleet.ParallelMode.SHARDING_PARALLEL


def train_paddle(rank: int, world_size: int, configs: dict[str, Any]) -> dict[str, Any]:
    """Trains the recorded job of Paddle's sharding; returns losses and the weights after each step."""
    fleet.init(is_collective=True, strategy=options(2, **configs))
    net = recorded_net()
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    model = fleet.distributed_model(net)
    inputs = np.load(DATA / "inputs.npz")
    x, y = torch.from_numpy(inputs[f"x{rank}"]), torch.from_numpy(inputs[f"y{rank}"]).long().reshape(12, 8)
    losses, history = [], []
    for step in range(12):
        loss = nn.functional.cross_entropy(model(x[step]), y[step])
        optimizer.minimize(loss)  # runs backward by itself
        optimizer.clear_grad()
        losses.append(loss.item())
        state = model.full_state_dict()
        history.append({name: state[key].numpy().T.copy() for name, key in PADDLE_NAMES.items()})
    return {"losses": losses, **{key: np.stack([h[key] for h in history]) for key in history[0]}}


PADDLE_NAMES = {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"}


@pytest.mark.parametrize("stage", [1, 3])
def test_equals_paddle(stage: int) -> None:
    """002-05: the recorded run of Paddle's sharding stage 1, within 1e-6 over 12 steps."""
    recorded = np.load(DATA / "sharding1.2ranks.npz")
    results = run_workers(train_paddle, 2, {"stage": stage}, backend=None)
    np.testing.assert_allclose(results[0]["losses"], recorded["losses"], atol=2e-6, rtol=0)
    for key in PADDLE_NAMES:
        np.testing.assert_allclose(results[0][key], recorded[key], atol=TOLERANCE, rtol=0, err_msg=key)
