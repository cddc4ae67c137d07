"""Rules: the configuration, the formulas against torch and against what Paddle recorded (D.5, 001-10, G15, G16)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fleet.errors import ConfigError
from fleet.ps import Accessor, Initializer, Rule, SparseTableConfig, rule_from_paddle
from fleet.ps.files.text_format import export_text
from tests.fleet.ps._tables import DATA
from tests.fleet.ps.reference_ids import sum_rows, unique_keys
from tests.fleet.ps.reference_store import table_of

BACKENDS = [pytest.param(True, id="kernels"), pytest.param(False, id="twins")]


@pytest.mark.parametrize("use_kernels", BACKENDS)
@pytest.mark.parametrize(
    ("rule", "make"),
    [
        (
            Rule("sgd", {"learning_rate": 0.1, "weight_decay": 0.01}),
            lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01),
        ),
        (Rule("momentum", {"learning_rate": 0.1, "momentum": 0.8}), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8)),
        (
            Rule("momentum", {"learning_rate": 0.1, "momentum": 0.8, "nesterov": 1}),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True),
        ),
        (
            Rule("adagrad", {"learning_rate": 0.1, "initial_accumulator": 0.5, "weight_decay": 0.01}),
            lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.5, weight_decay=0.01),
        ),
        (
            Rule("adam", {"learning_rate": 0.01, "beta1": 0.7, "beta2": 0.95}),
            lambda p: torch.optim.Adam(p, 0.01, betas=(0.7, 0.95)),
        ),
    ],
    ids=["sgd", "momentum", "nesterov", "adagrad", "adam"],
)
def test_rows_follow_torch(use_kernels: bool, rule: Rule, make: Callable[..., torch.optim.Optimizer]) -> None:
    """001-10, G15, G16, decision 8: the user's optimizer is the rule, with the user's betas and the right t."""
    rng = np.random.default_rng(1)
    config = SparseTableConfig("t", 5, rule, initializer=Initializer("normal", 0, 1))
    table = table_of(config, use_kernels)
    keys = np.array([3, -8, 2**62])
    parameter = torch.nn.Parameter(torch.from_numpy(table.pull(keys)))
    optimizer = make([parameter])
    for _ in range(25):
        gradient = rng.normal(size=(3, 5)).astype(np.float32)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        table.push(keys, gradient)
    np.testing.assert_allclose(table.pull(keys), parameter.detach().numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("use_kernels", BACKENDS)
def test_adam_beyond_the_table_of_corrections(use_kernels: bool) -> None:
    """G16: t goes on after the steps whose corrections stand ready."""
    rule = Rule("adam", {"learning_rate": 0.1, "beta2": 0.99999})
    config = SparseTableConfig("t", 1, rule, initializer=Initializer("constant", 1.0))
    table = table_of(config, use_kernels)
    keys = np.array([1])
    table.push(keys, np.zeros((1, 1), np.float32))
    block = next(table.blocks())
    # Row: w, m, v, t.
    block.values[0] = (1.0, 0.5, 0.25, 20000.0)
    table.insert(block)
    table.push(keys, np.full((1, 1), 2.0, np.float32))
    m, v = 0.9 * 0.5 + 0.1 * 2, 0.99999 * 0.25 + 0.00001 * 4
    expected = 1 - 0.1 * m / (np.sqrt(v / (1 - 0.99999**20001)) + 1e-8)
    np.testing.assert_allclose(table.pull(keys)[0, 0], expected, rtol=1e-5)


def _recorded(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parametrize("use_kernels", BACKENDS)
@pytest.mark.parametrize(
    ("name", "paddle_rule"),
    [
        ("async_sgd_naive", "SparseNaiveSGDRule"),
        ("async_sgd_adagrad", "SparseAdaGradSGDRule"),
        ("async_sgd_std_adagrad", "StdAdaGradSGDRule"),
        ("async_sgd_default", "SparseAdamSGDRule"),
    ],
)
def test_recorded_paddle_tables(use_kernels: bool, name: str, paddle_rule: str, tmp_path: Path) -> None:
    """D.4, D.5: rows, states and counters after every step of the recorded runs, to 1e-6.

    Paddle multiplies the pushed gradient by the batch size (12 here) and creates rows at the first push, where only
    the first column is updated; its random draws of the other columns are read from the record.
    """
    recorded = _recorded(name)
    batch_size = recorded["ids"].shape[1]
    rule = rule_from_paddle(paddle_rule, {"learning_rate": float(recorded["lr"])})
    config = SparseTableConfig(
        "emb", 4, rule, accessor=Accessor(), initializer=Initializer("constant", 0.0), create_on="push"
    )
    table = table_of(config, use_kernels)
    steps = len(recorded["ids"])
    for step in range(steps):
        ids = recorded["ids"][step]
        keys, inverse = unique_keys(ids)
        pulled = table.pull(keys)
        np.testing.assert_allclose(pulled, recorded["emb"][step][:10], atol=1e-6, err_msg=f"step {step}")
        gradients = sum_rows(recorded["emb_grad"][step] * np.float32(batch_size), inverse, len(keys))
        table.push(keys, gradients, np.bincount(inverse).astype(np.float32))
        if step == 0:
            drawn = recorded["emb"][1][:10] - table.pull(keys)
            assert np.abs(drawn[:, 0]).max() < 1e-6, "the first column starts at zero and is updated at once"
            assert np.abs(drawn[:, 1:]).max() > 1e-5, "the others start at a draw, which the first push leaves alone"
            table.add(keys, drawn)
    export_text(table, tmp_path)
    lines = (tmp_path / "emb" / "part-000-00000").read_text().splitlines()
    ours = {line.split()[0]: line.split() for line in lines}
    theirs = [line.split() for line in str(recorded["table0_text"]).splitlines() if line.strip()]
    assert len(theirs) == len(ours) == 10
    for line in theirs:
        # Six digits are recorded; second moments carry Paddle's float32 1 - 0.999, which is 1.3e-5 off.
        np.testing.assert_allclose(
            np.array(ours[line[0]], float), np.array(line, float), rtol=3e-5, atol=2e-6, err_msg=line[0]
        )


@pytest.mark.parametrize("use_kernels", BACKENDS)
def test_recorded_geo_rows(use_kernels: bool) -> None:
    """Decision 8: a worker's rows under geo are plain SGD with the true gradient; `add` moves them to the server."""
    recorded = _recorded("geo_sgd_k1")
    lr = np.float32(recorded["lr"])
    config = SparseTableConfig("emb", 4, Rule("sum"), initializer=Initializer("constant", 0.0))
    table = table_of(config, use_kernels)
    table.add(np.arange(10), recorded["EMBlocal0"][0].astype(np.float32))
    for step in range(len(recorded["ids"])):
        keys, inverse = unique_keys(recorded["ids"][step])
        table.add(keys, -lr * sum_rows(recorded["emb_grad"][step], inverse, len(keys)))
        np.testing.assert_allclose(table.pull(np.arange(10)), recorded["EMBlocal"][step], atol=1e-6)


@pytest.mark.parametrize("use_kernels", BACKENDS)
@pytest.mark.parametrize("name", ["rowwise_adagrad", "adagrad_v2", "shared_adagrad", "std_adagrad", "shared_adam"])
def test_formula_of_one_row(use_kernels: bool, name: str) -> None:
    """D.5: two pushes against the formula in float64."""
    rule = Rule(name, {"learning_rate": 0.1})
    config = SparseTableConfig("t", 3, rule, initializer=Initializer("constant", 1.0))
    table = table_of(config, use_kernels)
    key, w = np.array([7]), np.ones(3)
    total, m, v, t = np.zeros(3) if name == "std_adagrad" else 0.0, 0.0, 0.0, 0
    for g, show in ((np.array([1.0, -2.0, 3.0]), 2.0), (np.array([0.5, 0.25, -1.0]), 4.0)):
        table.pull(key)
        table.push(key, g[None].astype(np.float32), np.array([show], np.float32))
        s = g / show
        if name == "rowwise_adagrad":
            total = total + np.mean(g**2)
            w = w - 0.1 * g / (np.sqrt(total) + 1e-10)
        elif name == "adagrad_v2":
            total = total + np.mean(s**2)
            w = w - 0.1 * s / np.sqrt(total)
        elif name == "shared_adam":
            t += 1
            ms, vs = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            w = w - 0.1 / (1 - 0.9**t) * ms / (np.sqrt(vs / (1 - 0.999**t)) + 1e-8)
            m, v = ms.mean(), vs.mean()
        else:
            w = w - 0.1 * s * np.sqrt(3 / (3 + total))
            total = total + (s**2 if name == "std_adagrad" else np.mean(s**2))
        np.testing.assert_allclose(table.pull(key)[0], w, rtol=2e-6)


@pytest.mark.parametrize("use_kernels", BACKENDS)
@pytest.mark.parametrize("name", ["SparseAdamSGDRule", "SparseSharedAdamSGDRule", "torch"])
def test_where_adam_adds_epsilon(use_kernels: bool, name: str) -> None:
    """D.5: Paddle's rules add epsilon before the bias correction, torch's Adam after it; tiny gradients show it."""
    given = {"learning_rate": 0.05, "epsilon": 1e-6}
    rule = Rule("adam", given) if name == "torch" else rule_from_paddle(name, given)
    config = SparseTableConfig("t", 1, rule, initializer=Initializer("constant", 0.0))
    table = table_of(config, use_kernels)
    key, w, m, v = np.array([3]), 0.0, 0.0, 0.0
    for t, g in enumerate((1e-5, -2e-6, 3e-5), 1):
        table.push(key, np.full((1, 1), g, np.float32))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        root = np.sqrt(1 - 0.999**t)
        w -= 0.05 * root / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-6 * (root if name == "torch" else 1.0))
        np.testing.assert_allclose(table.pull(key)[0, 0], w, rtol=2e-5)


@pytest.mark.parametrize("use_kernels", BACKENDS)
def test_bounds_and_show_zero(use_kernels: bool) -> None:
    """D.4, D.5: weights are clamped after the update; a show of 0 divides by nothing; not-a-number stays visible."""
    rule = rule_from_paddle("SparseAdaGradSGDRule", {"learning_rate": 100.0})
    table = table_of(SparseTableConfig("t", 2, rule), use_kernels)
    keys = np.array([1, 2])
    table.pull(keys)
    gradients = np.array([[1, -1], [np.nan, 1]], np.float32)
    table.push(keys, gradients, np.zeros(2, np.float32))
    rows = table.pull(keys)
    assert rows[0].tolist() == [-10.0, 10.0]
    assert np.isnan(rows[1, 0])
    assert rows[1, 1] == -10.0


@pytest.mark.parametrize(
    ("name", "hyper", "word"),
    [
        ("sgdd", {}, "did you mean 'sgd'"),
        ("sgd", {"momentum": 0.9}, "does not read 'momentum'"),
        ("adam", {"beta1": 1.0}, "less than 1"),
        ("adam", {"learning_rate": -1.0}, "not negative"),
        ("adam", {"learning_rate": float("nan")}, "takes a number"),
        ("shared_adagrad", {"initial_g2sum": 0}, "greater than 0"),
        ("shared_adagrad", {"initial_g2sum": 1e39}, "finite in float32"),
        ("sgd", {"learning_rate": 1e39}, "finite in float32"),
        ("adagrad", {"initial_accumulator": 1e39}, "finite in float32"),
        ("sgd", {"lower_bound": 1, "upper_bound": 0}, "must not exceed"),
    ],
)
def test_wrong_rules_are_refused(name: str, hyper: dict[str, float], word: str) -> None:
    """Nothing is ignored: a hyper-parameter the rule does not read is an error."""
    with pytest.raises(ConfigError, match=f"(?i){word}"):
        Rule(name, hyper)


def test_paddle_names() -> None:
    """D.4: the names of the table configuration, with its bounds."""
    rule = rule_from_paddle("adagrad")
    assert rule.name == "shared_adagrad"
    assert (rule["initial_g2sum"], rule["lower_bound"], rule["upper_bound"]) == (3, -10, 10)
    with pytest.raises(ConfigError, match="does not exist"):
        rule_from_paddle("SparseFtrl")


@pytest.mark.parametrize("use_kernels", BACKENDS)
def test_learning_rate_changes(use_kernels: bool) -> None:
    """D.3: the rate may change between pushes."""
    config = SparseTableConfig("t", 1, Rule("sgd", {"learning_rate": 1.0}), initializer=Initializer("constant", 0.0))
    table = table_of(config, use_kernels)
    table.push(np.array([1]), np.ones((1, 1), np.float32))
    table.learning_rate = 0.25
    table.push(np.array([1]), np.ones((1, 1), np.float32))
    assert table.pull(np.array([1]))[0, 0] == -1.25
    assert table.learning_rate == 0.25
    with pytest.raises(ConfigError):
        table.learning_rate = -1.0
