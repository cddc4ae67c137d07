"""Optimizer states of recorded files: the losses that Paddle had next, step counts, refusals."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fleet
from fleet.checkpoint.paddle_files.paddle_optimizer import paddle_optimizer_state
from fleet.checkpoint.paddle_files.paddle_state import paddle_state
from fleet.errors import CheckpointError
from tests.helpers.paddle_files import CASES, RECORDED, VERSIONS, mlp

CASES_OF_VERSIONS = [
    (version, name) for version in VERSIONS for name in CASES if (version, name) != ("2.6.2", "amsgrad")
]


def losses_of(model: nn.Module, optimizer: Any, recorded: Any, rates: list[float] | None = None) -> list[float]:
    losses = []
    for step, (x, y) in enumerate(zip(recorded["x"], recorded["y"], strict=True)):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        loss = nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("version", "name"), CASES_OF_VERSIONS)
def test_the_next_losses_are_those_of_paddle(version: str, name: str) -> None:
    """Acceptance of issue 13: within 1e-5; and the weights after four more steps."""
    make_model, make_optimizer = CASES[name]
    path = RECORDED / version / f"{name}.pdopt"
    model = make_model()
    optimizer = make_optimizer(list(model.parameters()))
    model.load_state_dict(paddle_state(path.with_suffix(".pdparams"), model=model))
    optimizer.load_state_dict(paddle_optimizer_state(path, optimizer, model))
    rates = None
    if name == "static":
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    if name == "momentum":
        assert optimizer.param_groups[0]["lr"] == 0.05  # StepDecay after five of its steps of 3
        rates = [0.05, 0.025, 0.025, 0.025]
    with np.load(path.with_suffix(".npz")) as recorded:
        np.testing.assert_allclose(losses_of(model, optimizer, recorded, rates), recorded["losses"], rtol=0, atol=2e-6)
        if "w" in recorded:
            head = model[2] if isinstance(model, nn.Sequential) else model.head
            np.testing.assert_allclose(head.weight.detach().numpy().T, recorded["w"], rtol=0, atol=2e-6)
            np.testing.assert_allclose(head.bias.detach().numpy(), recorded["b"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_one_file_of_both(version: str) -> None:
    path = RECORDED / version / "one_file.pd"
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model.load_state_dict(paddle_state(path, model=model, key="model"))
    state = paddle_optimizer_state(path, optimizer, model, key="optimizer", parameters_key="model")
    optimizer.load_state_dict(state)
    assert {float(entry["step"]) for entry in optimizer.state.values()} == {5.0}
    with np.load(path.with_suffix(".npz")) as recorded:
        np.testing.assert_allclose(losses_of(model, optimizer, recorded), recorded["losses"], rtol=0, atol=2e-6)


def test_master_weights() -> None:
    path = RECORDED / "2.6.2" / "bfloat16.pdopt"
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model.load_state_dict(paddle_state(path.with_suffix(".pdparams"), model=model))
    with pytest.raises(CheckpointError, match=r"'0\.weight' of the model differs from its own.*masters="):
        paddle_optimizer_state(path, optimizer, model)
    model.load_state_dict(paddle_state(path.with_suffix(".pdparams"), model=model, masters=path))
    state = paddle_optimizer_state(path, optimizer, model)
    assert len(state["state"]) == 4
    assert float(state["state"][0]["step"]) == 0


# ---- crafted states of one weight ------------------------------------------------------------------------------------


def saved(folder: Path, **quantities: Any) -> Path:
    """Writes the files of ``nn.Linear(2, 3, bias=False)``, whose weight Paddle calls linear_0.w_0."""
    weight = np.arange(6, dtype="f4").reshape(2, 3)
    (folder / "m.pdparams").write_bytes(
        pickle.dumps({"weight": weight, "StructuredToParameterName@@": {"weight": "linear_0.w_0"}}, 4)
    )
    plain = {"LR_Scheduler"}
    (folder / "m.pdopt").write_bytes(
        pickle.dumps({k if k in plain else f"linear_0.w_0_{k}": v for k, v in quantities.items()}, 4)
    )
    return folder / "m.pdopt"


def adam_of(steps: float, betas: tuple[float, float] = (0.9, 0.999)) -> dict[str, Any]:
    powers = [np.array([np.float32(beta)]) for beta in betas]
    for _ in range(int(steps)):  # as Paddle does: products in float32
        powers = [power * np.float32(beta) for power, beta in zip(powers, betas, strict=True)]
    moment = np.arange(6, dtype="f4").reshape(2, 3)
    return {
        "moment1_0": moment,
        "moment2_0": moment**2,
        "beta1_pow_acc_0": powers[0],
        "beta2_pow_acc_0": powers[1],
    }


@pytest.mark.parametrize("steps", [0, 1, 5, 100, 600, 650, 700, 1000, 5000, 20_000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.5, 0.9999)])
def test_step_counts(steps: int, betas: tuple[float, float], tmp_path: Path) -> None:
    """The bias corrections are those of Paddle's own powers, and the count is exact while they allow it."""
    path = saved(tmp_path, **adam_of(steps, betas))
    model = nn.Linear(2, 3, bias=False)
    state = paddle_optimizer_state(path, torch.optim.Adam(model.parameters(), betas=betas), model)["state"][0]
    step = float(state["step"])
    if steps <= 600 and betas[0] == 0.9:
        assert step == steps
    for beta in betas:
        assert abs((1 - beta ** (step + 1)) / (1 - beta ** (steps + 1)) - 1) < 2e-4
    assert torch.equal(state["exp_avg"], torch.arange(6.0).reshape(2, 3).t())


def test_other_betas_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3, bias=False)
    path = saved(tmp_path, **adam_of(50))
    with pytest.raises(CheckpointError, match=r"beta1_pow_acc says 50\.0 steps, beta2_pow_acc 4\.1\. Give"):
        paddle_optimizer_state(path, torch.optim.Adam(model.parameters(), betas=(0.9, 0.99)), model)
    for wrong in (np.array([1.5], "f4"), np.array([np.nan], "f4"), np.ones((2,), "f4"), np.array([-1], "f4")):
        path = saved(tmp_path, **(adam_of(5) | {"beta1_pow_acc_0": wrong}))
        with pytest.raises(CheckpointError, match="one number of at least 0 and below 1"):
            paddle_optimizer_state(path, torch.optim.Adam(model.parameters()), model)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), r"SGD keeps none"),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9), r"Momentum keeps \['velocity'\]"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), r"moment2_max"),
        (lambda p: torch.optim.Adagrad(p), r"Adagrad keeps \['moment'\]"),
        (lambda p: torch.optim.Adagrad(p, lr_decay=0.1), "Omit lr_decay"),
        (lambda p: torch.optim.RMSprop(p), r"RMSprop.*epsilon in another place"),
        (lambda p: fleet.optimizer.RMSProp(0.1, parameters=p), r"RMSProp keeps \['mean_square'\]"),
        (lambda p: fleet.optimizer.Adamax(parameters=p), r"Adamax keeps"),
    ],
)
def test_other_optimizers_are_refused(make: Any, said: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 3, bias=False)
    with pytest.raises(CheckpointError, match=said):
        paddle_optimizer_state(saved(tmp_path, **adam_of(5)), make(list(model.parameters())), model)


def test_other_parameters_and_shapes_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(CheckpointError, match=r"'linear_\d+\.w_0_moment1_0', which belongs to no parameter"):
        paddle_optimizer_state(RECORDED / "2.6.2" / "adam.pdopt", optimizer, model, parameters=_params(tmp_path))
    twice = adam_of(5) | {"moment1_1": np.zeros((2, 3), "f4")}
    without = {name: value for name, value in adam_of(5).items() if name != "moment2_0"}
    for quantities, said in (
        (
            adam_of(5) | {"moment1_0": np.zeros((9, 2), "f4")},
            r"exp_avg is \[2, 9\]; the parameter of the model is \[3, 2\]",
        ),
        (twice, "moment1 of 'linear_0.w_0' twice"),
        (without, r"\['beta1_pow_acc', .*'moment1'\]"),
    ):
        path = saved(tmp_path, **quantities)
        with pytest.raises(CheckpointError, match=said):
            paddle_optimizer_state(path, optimizer, model)
    with pytest.raises(CheckpointError, match="not in model"):
        paddle_optimizer_state(saved(tmp_path, **adam_of(5)), torch.optim.Adam(mlp().parameters()), model)


def _params(folder: Path) -> Path:
    return saved(folder).with_suffix(".pdparams")


def test_a_parameter_without_gradients_has_no_state(tmp_path: Path) -> None:
    model = nn.Linear(2, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    assert paddle_optimizer_state(saved(tmp_path), optimizer, model)["state"] == {}


def test_rates(tmp_path: Path) -> None:
    """The rate of the file is that of the next step; groups of several rates are the user's to set."""
    model = nn.ModuleList([nn.Linear(2, 3, bias=False)])
    path = saved(tmp_path, **adam_of(5), LR_Scheduler={"last_epoch": 5, "last_lr": 0.25})
    names = {"0.weight": "weight"}
    optimizer = torch.optim.Adam(model.parameters(), 0.5)
    assert paddle_optimizer_state(path, optimizer, model, name_map=names)["param_groups"][0]["lr"] == 0.25
    kept = paddle_optimizer_state(path, optimizer, model, name_map=names, keep_rates=True)
    assert kept["param_groups"][0]["lr"] == 0.5
    model.append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.1})
    names |= {"1.weight": "w", "1.bias": "b"}
    one = {"weight": np.ones((2, 3), "f4"), "w": np.ones((1, 1), "f4"), "b": np.ones(1, "f4")}
    own = {"StructuredToParameterName@@": {"weight": "linear_0.w_0"}}
    path.with_suffix(".pdparams").write_bytes(pickle.dumps(one | own, 4))
    with pytest.raises(CheckpointError, match=r"rate 0\.25; the groups of optimizer have \[0\.1, 0\.5\].*keep_rates"):
        paddle_optimizer_state(path, optimizer, model, name_map=names)
    factored = [{"params": list(part.parameters()), "lr": 0.5 * n, "lr_factor": n} for n, part in enumerate(model, 1)]
    factors = torch.optim.Adam(factored)
    groups = paddle_optimizer_state(path, factors, model, name_map=names)["param_groups"]
    assert [group["lr"] for group in groups] == [0.25, 0.5]
