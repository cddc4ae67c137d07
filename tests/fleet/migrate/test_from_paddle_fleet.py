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
        ("x = paddle.zeros(shape=[2, 4], dtype='int64')", "x = torch.zeros(size=[2, 4], dtype=torch.int64)"),
        ("x = paddle.ones([2, 4], 'float32')", "x = torch.ones([2, 4], dtype=torch.float32)"),
        ("x = paddle.transpose(a, perm=[1, 0])", "x = torch.permute(a, dims=[1, 0])"),
        ("x = paddle.nn.functional.softmax(a)", "x = torch.nn.functional.softmax(a, dim=-1)"),
        ("x = paddle.nn.functional.softmax(a, axis=1)", "x = torch.nn.functional.softmax(a, dim=1)"),
        ("s = paddle.nn.Softmax()", "s = torch.nn.Softmax(dim=-1)"),
        ("n = paddle.nn.LayerNorm(8, epsilon=1e-6)", "n = torch.nn.LayerNorm(8, eps=1e-6)"),
        ("l = paddle.nn.Linear(1, 1, bias_attr=False)", "l = torch.nn.Linear(1, 1, bias=False)"),
        ("x = paddle.concat(x=[a, b], axis=1)", "x = torch.cat(tensors=[a, b], dim=1)"),
        ("x = paddle.add(x=a, y=b)", "x = torch.add(x=a, other=b)"),
        ("opt.clear_grad()", "opt.zero_grad()"),
        (
            "v = paddle.nn.CrossEntropyLoss()(a + 1, b)",
            "v = torch.nn.CrossEntropyLoss()((a + 1).flatten(0, -2), b.flatten())",
        ),
        (
            "f = paddle.nn.CrossEntropyLoss(); v = f(a, b)",
            "f = torch.nn.CrossEntropyLoss(); v = f(a.flatten(0, -2), b.flatten())",
        ),
        ("v = paddle.nn.functional.mse_loss(a, label=b)", "v = torch.nn.functional.mse_loss(a, target=b)"),
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
        ("y = paddle.nn.functional.linear(x, w)", "weight.T"),
        ("p = paddle.nn.AvgPool2D(3, padding=1)", "count_include_pad=False"),
        ("v = paddle.nn.functional.cross_entropy(a, b, soft_label=True)", "soft labels need no switch"),
        ("v = paddle.nn.functional.cross_entropy(a, b, reduction='none')", "no axis of 1"),
        ("f = paddle.nn.CrossEntropyLoss(reduction='none')", "no axis of 1"),
        ("l = paddle.nn.Linear(1, 1, bias_attr=w)", "torch.nn.init"),
    ],
)
def test_what_has_no_rule_is_named(line: str, advice: str) -> None:
    made = migrate(f"{_HEAD}{line}\n")
    assert len(made.by_hand) == 1, hand(made)
    assert advice in hand(made)


def test_a_script_that_starts_no_job_is_named() -> None:
    loop = "for x in loader:\n    net(x).backward()\n"
    assert "nothing in it starts a job" in hand(migrate(f"import paddle\nnet = paddle.nn.Linear(1, 1)\n{loop}"))
    started = f"import paddle\npaddle.distributed.init_parallel_env()\nnet = paddle.nn.Linear(1, 1)\n{loop}"
    assert hand(migrate(started)) == ""


def test_methods_of_wrapped_optimizers_stay() -> None:
    body = "o = fleet.distributed_optimizer(o)\no.clear_grad()\n"
    assert body in migrate(_HEAD + body).text


def test_dropped_arguments_of_a_loader_are_not_named() -> None:
    made = migrate(
        _HEAD + "l = paddle.io.DataLoader(d, places=paddle.CUDAPlace(paddle.distributed.get_rank()), num_workers=1)\n"
    )
    assert made.by_hand == []
    assert "l = torch.utils.data.DataLoader(d, num_workers=1)\n" in made.text


def test_what_chooses_eager_mode_goes() -> None:
    assert migrate(_HEAD + "paddle.disable_static()\nx = 1\n").text.endswith("from fleet import fleet\nx = 1\n")


def test_a_called_loader_is_the_loader_itself() -> None:
    body = "loader = paddle.io.DataLoader(data, batch_size=2)\nfor i, x in enumerate(loader()): pass\n"
    assert "enumerate(loader): pass" in migrate(_HEAD + body).text


@pytest.mark.parametrize(
    ("logits", "labels"), [([6, 3], [6]), ([6, 3], [6, 1]), ([2, 5, 3], [2, 5]), ([2, 3, 3], [2, 3, 1])]
)
def test_the_loss_means_the_last_axis_as_in_paddle(logits: list[int], labels: list[int]) -> None:
    import torch

    line = "loss = paddle.nn.functional.cross_entropy(input=z - 0, label=y)"
    made = migrate(f"{_HEAD}z, y = 0, 0\n{line}\n")
    assert made.by_hand == []
    torch.manual_seed(0)
    names = {"torch": torch, "z": torch.randn(logits), "y": torch.randint(3, labels)}
    exec(made.text.splitlines()[-1], names)
    z, y = names["z"].reshape(-1, 3), names["y"].reshape(-1)
    expected = torch.stack([row.logsumexp(0) - row[k] for row, k in zip(z, y, strict=True)]).mean()
    torch.testing.assert_close(names["loss"], expected)


def test_the_constructors_of_optimizers_are_there() -> None:
    assert {"Momentum", "AdamW", "Lamb"} <= set(dir(fleet.optimizer))
