"""The user's optimizer becomes the servers' rule, or is refused by name (D.3, 001-10, 002-17, G15, G16)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleet.errors import ConfigError, UnsupportedOptionError
from fleet.ps.table.accessor import Accessor
from fleet.ps.table.dense_table import DenseTable, DenseTableConfig
from fleet.ps.table.entry import CountFilterEntry
from fleet.ps.table.rules import Rule
from fleet.ps.table.sparse_table import SparseTableConfig
from fleet.ps.worker.optimizer_rules import check_geo_optimizer, rule_of_group
from tests.fleet.ps.reference_store import ReferenceTable

MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.95), 1e-6, weight_decay=0.03),
    "adamw without decay": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1, eps=1e-6, initial_accumulator_value=0.2, weight_decay=0.01),
}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_tables_take_the_steps_of_torch(name: str) -> None:
    """G16: the user's betas, epsilon and decay count, in dense tables and in rows."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(4, generator=generator))
    optimizer = MAKERS[name]([weight])
    rule = rule_of_group(optimizer, optimizer.param_groups[0])
    dense = DenseTable(DenseTableConfig("d", 4, rule))
    dense.set_values(weight.detach().numpy().copy())
    rows = ReferenceTable(SparseTableConfig("s", 4, rule))
    keys = np.array([7], np.int64)
    rows.add(keys, weight.detach().numpy()[None] - rows.pull(keys))
    for _ in range(5):
        weight.grad = torch.randn(4, generator=generator)
        dense.push(weight.grad.numpy().copy())
        rows.push(keys, weight.grad.numpy()[None].copy())
        optimizer.step()
        np.testing.assert_allclose(dense.pull(), weight.detach().numpy(), atol=2e-6)
        np.testing.assert_allclose(rows.pull(keys)[0], weight.detach().numpy(), atol=2e-6)


def test_only_plain_sgd_adds_up() -> None:
    """What waits may be one push only where nothing else than the sum counts."""
    sgd = Rule("sgd")
    assert sgd.adds_up
    assert DenseTableConfig("d", 4, sgd).adds_up
    assert SparseTableConfig("s", 4, sgd).adds_up
    for rule in (Rule("sgd", {"weight_decay": 0.1}), Rule("sgd", {"upper_bound": 1.0}), Rule("momentum"), Rule("adam")):
        assert not rule.adds_up
        assert not DenseTableConfig("d", 4, rule).adds_up
    assert not SparseTableConfig("s", 4, sgd, accessor=Accessor()).adds_up
    assert not SparseTableConfig("s", 4, sgd, entry=CountFilterEntry(3)).adds_up


def test_the_rate_before_any_schedule_is_the_tables() -> None:
    """A worker that comes back with a decayed rate makes the same tables."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.4)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)
    assert rule_of_group(optimizer, optimizer.param_groups[0])["learning_rate"] == 0.4


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.RMSprop(p), "no rule for it. Use torch.optim.SGD"),
        (lambda p: torch.optim.AdamW(p), "weight_decay=0.01"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.SGD(p, 0.1, maximize=True), "maximize"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1), "dampening"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "lr_decay"),
    ],
)
def test_what_servers_cannot_do_is_refused(make: Any, reason: str) -> None:
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(UnsupportedOptionError, match=reason):
        rule_of_group(optimizer, optimizer.param_groups[0])


def test_geo_takes_plain_sgd_only() -> None:
    """002-17."""
    weight = [torch.nn.Parameter(torch.zeros(1))]
    check_geo_optimizer(torch.optim.SGD(weight, 0.1))
    for wrong in (torch.optim.Adam(weight), torch.optim.SGD(weight, 0.1, weight_decay=0.1)):
        with pytest.raises(ConfigError, match="geo training"):
            check_geo_optimizer(wrong)
