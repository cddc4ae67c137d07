"""group_sharded_parallel and save_group_sharded_model: sharding by one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import fleet
from fleet.facade import Fleet
from tests.helpers.workers import run_workers
from tests.strategies.sharding.test_sharding import Net, net_of
from tests.strategies.sharding.test_sharding_company import trained
from tests.strategies.sharding.test_sharding_states import error_of, steps


def one_call(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Trains by group_sharded_parallel at each level, and saves."""
    found: dict[str, Any] = {"plain": trained(rank, None, "Adam", {"lr": 0.01})}
    for level in ("os", "os_g", "p_g_os"):
        fleet.init(is_collective=True)
        net = net_of(rank)
        raw = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.01)
        model, optimizer, scaler = fleet.group_sharded_parallel(net, raw, level)
        steps(model, optimizer, rank, 0, 3)
        fleet.save_group_sharded_model(model, f"{folder}/{level}", optimizer)
        files = [fleet.load(f"{folder}/{level}/model.{suffix}") for suffix in ("pdmodel", "pdopt")]
        found[level] = (*files, scaler)
        entries = optimizer.local_state_dict()["state"].values()
        found[f"{level} state"] = sum(value.numel() for entry in entries for value in entry.values())
    file = Path(folder, f"file{rank}")
    file.write_text("")
    net, raw = nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())
    found["errors"] = [
        error_of(fleet.save_group_sharded_model, model, str(file)),
        error_of(fleet.group_sharded_parallel, net, raw, "o"),
        error_of(fleet.group_sharded_parallel, net, raw, "os", exclude_layer=["GroupNorm"]),
        error_of(fleet.group_sharded_parallel, net, raw, "os", buffer_max_size=0),
        error_of(fleet.group_sharded_parallel, model, raw, "os"),
        error_of(fleet.save_group_sharded_model, net, folder),
    ]
    return found


def test_group_sharded_parallel(tmp_path: Path) -> None:
    """B.10, G19: the three levels train alike, 'os' keeps gradients whole; files load into plain objects."""
    results = run_workers(one_call, 2, str(tmp_path), backend=None)
    plain = results[0]["plain"]  # with rank 0's statistics
    for found in results:
        for level in ("os", "os_g", "p_g_os"):
            state, optimizer_state, scaler = found[level]
            net = Net()
            net.load_state_dict(state)
            torch.optim.Adam([p for p in net.parameters() if p.requires_grad]).load_state_dict(optimizer_state)
            assert scaler is None
            for name, value in plain.items():
                torch.testing.assert_close(state[name], value, atol=1e-6, rtol=0, msg=f"{level}: {name}")
            whole = sum(v.numel() for entry in optimizer_state["state"].values() for v in entry.values())
            assert found[f"{level} state"] < 0.62 * whole
        parts = ("Name a folder", "'os_g', 'p_g_os'", "exclude_layer", "at least 1", "takes your", "that group_sharded")
        for error, part in zip(found["errors"], parts, strict=True):
            assert part in error


def test_the_calls_are_fleets() -> None:
    """B.10: the calls are part of the public namespace."""
    for name in ("group_sharded_parallel", "save_group_sharded_model", "get_hybrid_communicate_group"):
        assert name in vars(Fleet)
        assert name in fleet.__all__
