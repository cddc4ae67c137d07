"""Dense tables: rules against torch and the specification (D.3, G16), and what they refuse."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fleet.errors import ConfigError
from fleet.ps import DenseTable, DenseTableConfig, Rule
from fleet.ps.table.kernels.id_kernels import PIECE
from fleet.ps.table.rules import LEARNING_RATE, RULES
from tests.fleet.ps.reference_rules import ReferenceDenseTable


@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (Rule("sgd", {"learning_rate": 0.1}), lambda p: torch.optim.SGD(p, 0.1)),
        (Rule("momentum", {"learning_rate": 0.1, "momentum": 0.9}), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        (Rule("adagrad", {"learning_rate": 0.1}), lambda p: torch.optim.Adagrad(p, 0.1)),
        (
            Rule("adam", {"learning_rate": 0.01, "beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}),
            lambda p: torch.optim.Adam(p, 0.01, betas=(0.5, 0.9), eps=1e-3),
        ),
    ],
    ids=["sgd", "momentum", "adagrad", "adam"],
)
@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "twins"])
def test_follows_torch(use_kernels: bool, rule: Rule, make: Callable[..., torch.optim.Optimizer]) -> None:
    """001-10, G15, G16: the user's optimizer, betas and epsilon, with the right step from the first push on."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=33).astype(np.float32)
    config = DenseTableConfig("d", 33, rule)
    table = DenseTable(config) if use_kernels else ReferenceDenseTable(config)
    table.set_values(start)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = make([parameter])
    for _ in range(20):
        gradient = rng.normal(size=33).astype(np.float32)
        table.push(gradient)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    np.testing.assert_allclose(table.pull(), parameter.detach().numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, 2 * PIECE + 17])
@pytest.mark.parametrize(
    "rule",
    [
        Rule("sgd", {"weight_decay": 0.1, "lower_bound": -1.0, "upper_bound": 0.5}),
        Rule("momentum", {"nesterov": 1.0, "weight_decay": 0.1}),
        Rule("adagrad", {"initial_accumulator": 0.25}),
        Rule("sum"),
        Rule("adam", {"weight_decay": 0.1}),
        Rule("adam_d2sum"),
        Rule("summary"),
    ],
    ids=lambda rule: rule.name,
)
def test_a_mean_is_applied_as_one_gradient(rule: Rule, size: int, count: int) -> None:
    """Values and state are bit for bit those of a push of the mean, whether or not the rule takes it in pieces."""
    rng = np.random.default_rng(size + count)
    start = rng.normal(size=size).astype(np.float32)
    tables = [DenseTable(DenseTableConfig("d", size, rule)) for _ in range(2)]
    for table in tables:
        table.set_values(start)
    for step in range(3):
        gradients = [rng.normal(size=size).astype(np.float32) for _ in range(count)]
        tables[0].push_mean(gradients, count + step)
        total = np.zeros(size, np.float32)
        for gradient in gradients:
            total += gradient
        tables[1].push(total / np.float32(count + step))
        if LEARNING_RATE in rule:
            tables[1].learning_rate = tables[0].learning_rate = 0.01
    for found, wanted in zip(tables[0].read_state(), tables[1].read_state(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_piece_changes_nothing_behind_the_row() -> None:
    table = DenseTable(DenseTableConfig("d", 3 * PIECE, Rule("adam")))
    length = len(table._row)
    whole = np.full(length + 4 * PIECE, 7, np.float32)
    whole[:length] = table._row
    table._row = whole[:length]
    table.push_mean([np.ones(3 * PIECE, np.float32)] * 2, 2)
    assert (whole[length:] == 7).all()
    assert table._row[-1] == 1  # steps


def test_which_rules_take_a_row_in_pieces() -> None:
    found = {name for name, spec in RULES.items() if spec.by_element}
    assert found == {"sgd", "momentum", "adagrad", "std_adagrad", "adam", "sum"}


def test_a_mean_of_other_sizes_is_refused() -> None:
    table = DenseTable(DenseTableConfig("d", 3, Rule("sgd")))
    with pytest.raises(ConfigError, match=r"gradient is float32 \(4,\); it takes float32 \(3,\)"):
        table.push_mean([np.ones(4, np.float32)] * 2, 2)
    with pytest.raises(ConfigError, match=r"arrays of \[3, 4\] numbers have no mean"):
        table.push_mean([np.ones(3, np.float32), np.ones(4, np.float32)], 2)
    assert not table.pull().any()


def test_adam_d2sum() -> None:
    """D.3: the formula of the table, in float64."""
    table = DenseTable(DenseTableConfig("d", 3, Rule("adam_d2sum", {"learning_rate": 0.1})))
    p, velocity, squares, decay = np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3)
    for g in np.random.default_rng(0).normal(size=(6, 3)):
        table.push(g.astype(np.float32))
        decay = 0.9999 * decay + 1
        squares = 0.9999 * squares + g**2
        ratio = np.sqrt((decay + decay * 1e-8) / (squares + decay * 1e-8))
        velocity = 0.99 * velocity - 0.01 * g
        p = p + 0.1 * velocity * ratio
        np.testing.assert_allclose(table.pull(), p, rtol=2e-4, atol=1e-6)


def test_summary_and_sum() -> None:
    """D.2, D.3: data_norm statistics fade; geo deltas add."""
    summary = DenseTable(DenseTableConfig("d", 2, Rule("summary")))
    summary.set_values(np.array([1000, 0], np.float32))
    summary.push(np.array([0, 2], np.float32))
    np.testing.assert_allclose(summary.pull(), [999.999, 2], rtol=1e-7)
    deltas = DenseTable(DenseTableConfig("d", 2, Rule("sum")))
    deltas.push(np.array([1, 2], np.float32))
    deltas.add(np.array([1, 2], np.float32))
    assert deltas.pull().tolist() == [2, 4]


def test_threads_lose_nothing() -> None:
    """Every call is atomic."""
    table = DenseTable(DenseTableConfig("d", 1000, Rule("sgd", {"learning_rate": 1.0})))

    def push() -> None:
        for _ in range(200):
            table.push(np.ones(1000, np.float32))

    threads = [threading.Thread(target=push) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (table.pull() == -800).all()


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "twins"])
def test_learning_rate_and_state(use_kernels: bool) -> None:
    """The rate may change; state goes out and in."""
    config = DenseTableConfig("d", 2, Rule("momentum", {"learning_rate": 1.0}))
    table = DenseTable(config) if use_kernels else ReferenceDenseTable(config)
    table.push(np.ones(2, np.float32))
    table.learning_rate = 0.5
    values, state = table.read_state()
    assert (table.learning_rate, state.tolist()) == (0.5, [1, 1])
    copy = DenseTable(table.config)
    copy.set_state(values, state)
    copy.learning_rate = 0.5
    for each in (table, copy):
        each.push(np.ones(2, np.float32))
    np.testing.assert_allclose(table.pull(), [-1.95, -1.95], rtol=1e-6)
    np.testing.assert_array_equal(copy.pull(np.empty(2, np.float32)), table.pull())
    with pytest.raises(ConfigError, match="state"):
        copy.set_state(values, np.empty(3, np.float32))


def test_wrong_arrays_and_rules() -> None:
    """Refused with what fits; nothing changes."""
    table = DenseTable(DenseTableConfig("d", 2))
    for call in (table.push, table.add, table.set_values, table.pull):
        with pytest.raises(ConfigError, match="takes"):
            call(np.ones(3, np.float32))
        with pytest.raises(ConfigError, match="takes"):
            call(np.ones(2))
    assert table.pull().tolist() == [0, 0]
    with pytest.raises(ConfigError, match="sparse tables only"):
        DenseTableConfig("d", 2, Rule("shared_adagrad"))
    with pytest.raises(ConfigError, match="size"):
        DenseTableConfig("d", -1)
