"""What scripts do with a divided model beside the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fleet
from tests.helpers.workers import run_workers
from tests.strategies.sharding.test_sharding import Net, batch, net_of, options
from tests.strategies.sharding.test_sharding_states import error_of


class WithMethod(Net):
    """A net whose features can be asked for."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what goes into the last layer."""
        return self.norm(self.first(x))  # type: ignore[no-any-return]


def corners(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Walks through what scripts do beside the plain loop, in stages 2 and 3."""
    found: dict[str, Any] = {}
    for stage in (2, 3):
        strategy = options(2, stage=stage)
        fleet.init(is_collective=True, strategy=strategy)
        net = WithMethod()
        net.load_state_dict(net_of(0).state_dict())
        seen: list[torch.Size] = []
        net.last.weight.register_hook(lambda gradient, seen=seen: seen.append(gradient.shape))
        model = fleet.distributed_model(net)
        model.eval()(batch(0, rank))  # no backward: the parameters are gathered now
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        late = fleet.distributed_optimizer(torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.01))
        found[f"named {stage}"] = type(net).__name__ == type(net).__qualname__ == net._get_name() == "WithMethod"
        found[f"repointed {stage}"] = all(a is b for a, b in zip(parameters, late.parameters(), strict=True))
        loss = model(batch(0, rank)).square().mean()
        model.zero_grad()  # between forward and backward
        loss.backward()
        with torch.no_grad():
            before = model(batch(1, rank))  # gathers what the step changes
        late.step()
        model.zero_grad()
        with torch.no_grad():
            after = model(batch(1, rank))
        found[f"moved {stage}"] = not torch.equal(before, after)
        found[f"cleared {stage}"] = all(p.grad is None for p in model.parameters())
        found[f"hook {stage}"] = [tuple(shape) for shape in seen]
        model.mark_forward_method("features")
        model.features(batch(0, rank)).square().mean().backward()
        found[f"method {stage}"] = parameters[0].grad is not None
        with model.no_sync():
            model(batch(0, rank)).square().mean().backward()
        found[f"saved {stage}"] = error_of(fleet.save, {"m": dict(net.state_dict())}, f"{folder}/{rank}.pdparams")
    return found


def test_corners(tmp_path: Path) -> None:
    """Style-models part 4: weights move in any order of calls; hooks, methods and clearing act as in one process."""
    for found in run_workers(corners, 2, str(tmp_path), backend=None):
        for stage in (2, 3):
            for name in ("named", "repointed", "moved", "cleared", "method"):
                assert found[f"{name} {stage}"] is True, f"{name} {stage}"
            assert found[f"hook {stage}"] == [(3, 7)]
            assert ("full_state_dict() on every" in found[f"saved {stage}"]) == (stage == 3)  # in stage 2 it is whole


def small() -> nn.Sequential:
    """Returns a net without buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


CLEARS = ("optimizer", "model", "zeros", "nothing")


def dropped_windows(rank: int, world_size: int) -> dict[str, Any]:
    """Returns the gradients after a window under no_sync() that was cleared, or not, and one exchanging pass."""
    found: dict[str, Any] = {}
    for stage in (2, 3):
        fleet.init(is_collective=True, strategy=options(2, stage=stage))
        net = small()
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        model = fleet.distributed_model(net)
        for clear in CLEARS:
            with model.no_sync():
                model(batch(0, rank)).square().mean().backward()
            if clear == "model":
                model.zero_grad()
            elif clear != "nothing":
                optimizer.zero_grad(set_to_none=clear == "optimizer")
            model(batch(1, rank)).square().mean().backward()
            found[f"{clear} {stage}"] = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr, operator]
            optimizer.zero_grad()
        with model.no_sync():
            model(batch(0, rank)).square().mean().backward()
        optimizer.zero_grad()
        optimizer.step()  # of nothing
    return found


def test_a_window_that_was_cleared_counts_for_nothing() -> None:
    """no_sync(): zero_grad() of optimizer and model drop the gradients of the window in stages 2 and 3."""
    for found in run_workers(dropped_windows, 2, backend=None):
        for clear in CLEARS:
            net = small()
            for step in (0, 1) if clear == "nothing" else (1,):
                for rank in range(2):
                    (net(batch(step, rank)).square().mean() / 2).backward()
            for stage in (2, 3):
                torch.testing.assert_close(found[f"{clear} {stage}"], [p.grad for p in net.parameters()])


class ReadFromOutside(nn.Module):
    """A parameter list, and a layer whose weight another one reads; neither is called."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
        self.read = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the shape of ``x``."""
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        return F.linear(x, self.read.weight)


READERS: dict[str, Any] = {
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "decoder": lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    "outside": ReadFromOutside,
}


def reader_loss(model: Any, kind: str, rank: int, penalty: Any) -> torch.Tensor:
    """Returns a loss of two workers' batches, with a weight penalty that ``penalty`` makes of a parameter."""
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank))
    out = model(x, x) if kind == "decoder" else model(x)
    return out.square().mean() + 0.1 * sum(penalty(p) for p in model.parameters())  # type: ignore[no-any-return]


def whole(tensor: Any) -> torch.Tensor:
    """Returns ``tensor`` gathered, where it is a part."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def read_without_calls(rank: int, world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the gradients of each model in each stage with amp in float16, with recompute and without."""
    found = {}
    for kind, make in READERS.items():
        for stage in (1, 2, 3):
            strategy = options(2, stage=stage)
            strategy.amp = True
            strategy.amp_configs = {"dtype": "float16"}
            if kind == "encoder":
                strategy.recompute = True
                strategy.recompute_configs = {"checkpoints": ["self_attn"]}
            fleet.init(is_collective=True, strategy=strategy)
            torch.manual_seed(0)
            net = make()
            fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            model = fleet.distributed_model(net)
            with model.no_sync():
                reader_loss(model, kind, rank, lambda p: whole(p).square().sum()).backward()
            reader_loss(model, kind, rank + 2, lambda p: whole(p).square().sum()).backward()
            found[f"{kind} {stage}"] = {name: whole(p.grad) for name, p in model.named_parameters()}
    return found


def test_amp_unscales_what_is_read_without_a_call() -> None:
    """A.2 amp: gradients have the true size in every stage, whoever reads the parameter; two batches, a penalty."""
    for found in run_workers(read_without_calls, 2, backend=None):
        for kind, make in READERS.items():
            torch.manual_seed(0)
            net = make()
            for rank in range(4):
                (reader_loss(net, kind, rank, lambda p: p.square().sum()) / 2).backward()
            for stage in (1, 2, 3):
                for name, p in net.named_parameters():
                    mine = found[f"{kind} {stage}"][name]
                    torch.testing.assert_close(mine, p.grad, atol=5e-3, rtol=0, msg=f"{kind} {stage} {name}")


def hooks(rank: int, world_size: int) -> dict[str, Any]:
    """Returns what hooks of a parameter saw in each stage: made before and after wrapping; one is removed."""
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        strategy = options(2, stage=stage)
        strategy.amp = True
        strategy.amp_configs = {"dtype": "float16"}
        fleet.init(is_collective=True, strategy=strategy)
        net, seen, late = nn.Linear(4, 4), [], []
        first = net.weight.register_hook(
            lambda g, seen=seen: seen.append(("hook", tuple(g.shape), float(g.abs().max())))
        )
        net.weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(("post", tuple(p.grad.shape))))
        fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        model = fleet.distributed_model(net)
        weight = dict(model.named_parameters())["weight"]
        weight.register_hook(lambda g, late=late: late.append("hook"))
        weight.register_post_accumulate_grad_hook(lambda p, late=late: late.append("post"))
        model(torch.ones(2, 4)).mean().backward()
        first.remove()
        model(torch.ones(2, 4)).mean().backward()
        found[str(stage)] = seen, late
    return found


def test_hooks_of_parameters() -> None:
    """Issue: hooks from before and after wrapping are called once, with true sizes; a handle still removes its hook."""
    for found in run_workers(hooks, 2, backend=None):
        for stage in "123":
            seen, late = found[stage]
            assert seen == [("hook", (4, 4), 0.25), ("post", (4, 4)), ("post", (4, 4))], stage
            assert late == ["hook", "post", "hook", "post"], stage


def layouts(rank: int, world_size: int) -> dict[str, Any]:
    """Returns gradients of a channels_last model in each stage, and what two types and a read unit are told."""
    found: dict[str, Any] = {}
    for stage in (1, 2, 3):
        fleet.init(is_collective=True, strategy=options(2, stage=stage, segment_broadcast_MB=0.0001))
        model = fleet.distributed_model(conv_net())
        fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        conv_loss(model, rank).backward()
        found[f"conv {stage}"] = {name: whole(p.grad).contiguous() for name, p in model.named_parameters()}
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
        before = dict(net.named_parameters())
        found[f"types {stage}"] = error_of(fleet.distributed_model, net)
        found[f"kept {stage}"] = stage < 3 or all(p is before[name] for name, p in net.named_parameters())
        if stage > 1:
            anchored = options(2, stage=stage, sharding_segment_strategy="segment_anchors", segment_anchors=["1"])
            fleet.init(is_collective=True, strategy=anchored)
            two = fleet.distributed_model(nn.Sequential(nn.Linear(2, 2), Narrow(2, 2)))
            fleet.distributed_optimizer(torch.optim.SGD(two.parameters(), lr=0.1))
            two(torch.ones(1, 2)).sum().backward()
            found[f"anchored {stage}"] = [str(p.grad.dtype) for p in two.parameters()]
    fleet.init(is_collective=True, strategy=options(2, stage=3, segment_broadcast_MB=0.0001))
    reader = fleet.distributed_model(ReadFromOutside())
    fleet.distributed_optimizer(torch.optim.SGD(reader.parameters(), lr=0.1))
    found["read"] = error_of(reader, torch.ones(2, 8))
    return found


class Narrow(nn.Linear):
    """A layer of bfloat16 in a float32 model."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns float32."""
        return super().forward(x.bfloat16()).float()


def conv_net() -> nn.Module:
    """Returns a convolutional net in channels_last."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 3))
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def conv_loss(model: Any, rank: int) -> torch.Tensor:
    """Returns the loss of one worker's batch."""
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(rank))
    return model(x.to(memory_format=torch.channels_last)).square().mean()  # type: ignore[no-any-return]


def test_layouts_and_types() -> None:
    """Issue: channels_last trains in every stage; two types in a unit are refused with nothing changed."""
    plain = conv_net()
    for rank in range(2):
        (conv_loss(plain, rank) / 2).backward()
    for found in run_workers(layouts, 2, backend=None):
        for stage in (1, 2, 3):
            for name, p in plain.named_parameters():
                torch.testing.assert_close(found[f"conv {stage}"][name], p.grad, atol=1e-6, rtol=0)
            assert ("'1.bias' is bfloat16" in found[f"types {stage}"]) == (stage == 3), found[f"types {stage}"]
            assert found[f"kept {stage}"] is True
            if stage > 1:
                assert found[f"anchored {stage}"] == ["torch.float32"] * 2 + ["torch.bfloat16"] * 2
        assert "F.linear(x, self.read.weight)" in found["read"]
        assert "without calling" in found["read"]
