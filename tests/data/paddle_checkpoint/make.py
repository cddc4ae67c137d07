"""Records the files beside it with Paddle: python make.py FOLDER, once in an environment of each version.

Each case is trained for five steps and saved; CASE.npz then holds the inputs (``x``, ``y``) and losses (``losses``) of
the next four steps, ``evaluated``: the loss of the saved state on the first of these batches in evaluation, and
``w`` and ``b``: the last layer after the four steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

STEPS, MORE = 5, 4
optimizers = paddle.optimizer


class Mixed(nn.Layer):
    """An embedding, a convolution, both norms, and two linear layers, of which one is square."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.conv = nn.Conv1D(8, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1D(8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, ids):
        x = self.words(ids).transpose([0, 2, 1])
        x = self.batch_norm(self.conv(x)).mean(-1)
        return self.head(nn.functional.relu(self.hidden(self.norm(x))))


def mlp():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def batches(model, seed):
    draw = np.random.default_rng(seed)
    n = STEPS + MORE
    x = draw.integers(0, 12, (n, 6, 5)) if isinstance(model, Mixed) else draw.normal(size=(n, 6, 8)).astype("float32")
    return x, draw.integers(0, 4, (n, 6))


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(paddle.to_tensor(x)), paddle.to_tensor(y))


def record(folder, name, model, optimizer, save, scheduler=None):
    xs, ys = batches(model, 7)
    losses = []
    for step, (x, y) in enumerate(zip(xs, ys, strict=True)):
        if step == STEPS:
            save(folder / name, model, optimizer)
            model.eval()
            evaluated = float(loss_of(model, x, y))
            model.train()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss))
    head = model[2] if isinstance(model, nn.Sequential) else model.head
    after = {"w": np.array(head.weight.astype("float32")), "b": np.array(head.bias.astype("float32"))}
    np.savez(folder / f"{name}.npz", x=xs[STEPS:], y=ys[STEPS:], losses=losses[STEPS:], evaluated=evaluated, **after)


def two_files(protocol):
    def save(path, model, optimizer):
        paddle.save(model.state_dict(), f"{path}.pdparams", protocol=protocol)
        paddle.save(optimizer.state_dict(), f"{path}.pdopt", protocol=protocol)

    return save


def one_file(path, model, optimizer):
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "note": "mixed"}
    paddle.save(both, f"{path}.pd")


def dynamic(folder):
    schedule = optimizers.lr.StepDecay(0.1, step_size=3, gamma=0.5)
    cases = {
        "adamw": (Mixed, lambda p: optimizers.AdamW(0.01, parameters=p, weight_decay=0.05), two_files(4), None),
        "adam": (mlp, lambda p: optimizers.Adam(0.01, parameters=p), two_files(2), None),
        "amsgrad": (mlp, lambda p: optimizers.Adam(0.01, parameters=p, amsgrad=True), two_files(4), None),
        "momentum": (
            Mixed,
            lambda p: optimizers.Momentum(schedule, 0.9, parameters=p, use_nesterov=True),
            two_files(3),
            schedule,
        ),
        "sgd": (mlp, lambda p: optimizers.SGD(0.1, parameters=p), two_files(4), None),
        "adagrad": (mlp, lambda p: optimizers.Adagrad(0.1, parameters=p), two_files(4), None),
        "rmsprop": (
            mlp,
            lambda p: optimizers.RMSProp(0.01, momentum=0.9, centered=True, parameters=p),
            two_files(4),
            None,
        ),
        "adamax": (mlp, lambda p: optimizers.Adamax(0.01, parameters=p), two_files(4), None),
        "lamb": (mlp, lambda p: optimizers.Lamb(0.01, parameters=p), two_files(4), None),
        "one_file": (mlp, lambda p: optimizers.Adam(0.01, parameters=p), one_file, None),
    }
    for name, (make, make_optimizer, save, scheduler) in cases.items():
        paddle.seed(3)
        model = make()
        try:
            optimizer = make_optimizer(model.parameters())
        except TypeError as error:  # an argument that this version does not have
            print(name, "left out:", error)
            continue
        record(folder, name, model, optimizer, save, scheduler)


def bfloat16(folder):
    """Parameters in bfloat16 with master weights; the CPU build has no kernel for the step, so the state is drawn."""
    paddle.seed(3)
    model = mlp().astype("bfloat16")
    optimizer = optimizers.AdamW(0.01, parameters=model.parameters(), multi_precision=True)
    draw = np.random.default_rng(5)
    for parameter in model.parameters():
        parameter.grad = paddle.ones(parameter.shape, "float32").astype("bfloat16")
    try:
        optimizer.step()
    except (RuntimeError, ValueError) as error:
        print("bfloat16:", str(error).strip().splitlines()[-1][:80])  # the state exists from here on
    state = optimizer.state_dict()
    if "master_weights" not in state:
        print("bfloat16 left out: no master weights before the first step")
        return
    for name, tensor in [*state.items(), *state["master_weights"].items()]:
        if name != "master_weights" and "pow" not in name:
            tensor.set_value(draw.normal(size=tensor.shape).astype("float32"))
    two_files(4)(folder / "bfloat16", model, optimizer)
    shown = {name: np.array(value.astype("float32")) for name, value in model.state_dict().items()}
    shown |= {f"master/{name}": np.array(value) for name, value in state["master_weights"].items()}
    np.savez(folder / "bfloat16.npz", **shown)


def static(folder):
    paddle.enable_static()
    main, start = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, start), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", [None, 8])
        y = paddle.static.data("y", [None], "int64")
        first, last = nn.Linear(8, 8), nn.Linear(8, 4)
        loss = nn.functional.cross_entropy(last(nn.functional.relu(first(x))), y)
        optimizers.Adam(0.01).minimize(loss)
    main.random_seed = start.random_seed = 3
    executor = paddle.static.Executor()
    executor.run(start)
    xs, ys = batches(None, 7)
    losses = []
    for step in range(STEPS + MORE):
        if step == STEPS:
            paddle.static.save(main, str(folder / "static"))
            (folder / "static.pdmodel").unlink(missing_ok=True)
            (folder / "static.json").unlink(missing_ok=True)
            paddle.save({"model": main.state_dict("param"), "epoch": 3}, str(folder / "static_nested.pd"))
        losses += executor.run(main, {"x": xs[step], "y": ys[step]}, [loss])
    losses = np.array(losses, float).reshape(-1)
    np.savez(folder / "static.npz", x=xs[STEPS:], y=ys[STEPS:], losses=losses[STEPS:])


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for part in (dynamic, bfloat16, static):
        with paddle.utils.unique_name.guard():
            part(target)
