"""Scripts of Paddle: names, loaders, and the static graph, which is named."""

from __future__ import annotations

import pytest

import fleet
from fleet.migrate.from_paddle_fleet import NAMES
from fleet.migrate.migrate_command import migrate
from tests.fleet.migrate.cases import hand

_HEAD = "import paddle\nfrom paddle.distributed import fleet\n"


@pytest.mark.parametrize(("old", "new"), sorted(NAMES.items()))
def test_every_name_of_a_rule_exists(old: str, new: str) -> None:
    import importlib

    path = new.rstrip(".").split(".")
    found: object = importlib.import_module(path[0])
    for place, part in enumerate(path[1:], start=1):
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(path[: place + 1]))
    assert found is not None
    assert old.endswith(".") == new.endswith(".")


@pytest.mark.parametrize(
    ("line", "moved"),
    [
        ("x = paddle.concat([a, b], axis=1)", "x = torch.cat([a, b], dim=1)"),
        ("n = paddle.distributed.get_rank()", "n = fleet.get_rank()"),
        ("o = paddle.optimizer.AdamW(0.1, parameters=p)", "o = fleet.optimizer.AdamW(0.1, parameters=p)"),
        ("v = loss.numpy()", "v = loss.detach().cpu().numpy()"),
        ("class Net(paddle.nn.Layer): pass", "class Net(torch.nn.Module): pass"),
        ("s = fleet.DistributedStrategy()", "s = fleet.DistributedStrategy()"),
    ],
)
def test_names_are_moved(line: str, moved: str) -> None:
    made = migrate(f"{_HEAD}{line}\n")
    assert made.by_hand == []
    assert made.text == f"import torch\nfrom fleet import fleet\n{moved}\n"


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("paddle.enable_static()", "torch.nn.Module"),
        ("exe = paddle.static.Executor(p)", "torch.nn.Module"),
        ("x = paddle.fluid.layers.data('x')", "torch.nn.Module"),
        ("s = paddle.optimizer.lr.StepDecay(0.1, 3)", "torch.optim.lr_scheduler"),
        ("b = paddle.nn.BatchNorm2D(3)", "momentum"),
        ("m = paddle.metric.Accuracy()", "fleet.metrics"),
        ("paddle.flops(x)", "migration.md"),
        ("l = paddle.nn.Linear(1, 1, weight_attr=w)", "torch.nn.init"),
        ("w.clear_gradient()", "parameter.grad = None"),
    ],
)
def test_what_has_no_rule_is_named(line: str, advice: str) -> None:
    made = migrate(f"{_HEAD}{line}\n")
    assert len(made.by_hand) == 1, hand(made)
    assert advice in hand(made)


def test_the_constructors_of_optimizers_are_there() -> None:
    assert {"Momentum", "AdamW", "Lamb"} <= set(dir(fleet.optimizer))
