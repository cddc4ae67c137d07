"""Where a model and the state of its optimizers lie; the device "meta" stands for a GPU where there is none."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from fleet.errors import ConfigError
from fleet.job.broken_exchange import explained
from fleet.training.placement import check_placement, move_model, move_state

HOST = torch.device("cpu")


def test_a_model_on_a_gpu_is_refused_where_the_worker_has_the_cpu() -> None:
    """It would train with the options of the CPU: amp would be off, for one."""
    net: Any = SimpleNamespace(
        named_parameters=lambda: [("0.weight", SimpleNamespace(is_meta=False, device=torch.device("cuda", 0)))],
        named_buffers=list,
    )
    with pytest.raises(ConfigError, match="'0.weight' is on cuda:0, and fleet.init.* this worker the CPU.*--gpus=0,1"):
        check_placement(net, HOST)
    check_placement(net, torch.device("cuda", 0))
    check_placement(nn.Linear(2, 2), torch.device("cuda", 0))


def test_a_cpu_moves_nothing() -> None:
    assert move_model(nn.Linear(2, 2), HOST, []) == set()


@pytest.mark.parametrize(("options", "steps"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_state_follows_the_parameters(options: dict[str, bool], steps: str) -> None:
    """As load_state_dict places it: counts of steps stay on the host unless kernels count them."""
    moved, stays = (nn.Parameter(torch.zeros(2, device=device)) for device in ("meta", "cpu"))
    optimizer = torch.optim.Adam([moved, stays], 0.1)
    optimizer.param_groups[0].update(options)
    history = [torch.ones(2), {"inner": torch.ones(3)}]
    for parameter in (moved, stays):
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0), "exp_avg": torch.ones(2), "history": copy.copy(history), "count": 7
        }  # fmt: skip
    move_state(optimizer, {moved})
    found = optimizer.state[moved]
    assert (found["exp_avg"].device.type, found["step"].device.type, found["count"]) == ("meta", steps, 7)
    assert [found["history"][0].device.type, found["history"][1]["inner"].device.type] == ["meta", "meta"]
    left = optimizer.state[stays]
    assert {left["exp_avg"].device.type, left["step"].device.type, left["history"][0].device.type} == {"cpu"}


def test_a_batch_on_another_device_is_explained() -> None:
    """torch names an operation and an argument; the user is to move the batch."""
    error = RuntimeError("Expected all tensors to be on the same device, but got mat1 is on cpu\nmore")
    card = SimpleNamespace(device=torch.device("cuda", 0))
    model: Any = SimpleNamespace(module=SimpleNamespace(parameters=lambda: [card]))
    found = explained(error, [model], None, "[rank 0 of 1]")
    assert isinstance(found, ConfigError)
    assert "here cuda:0; move each batch there, too: batch = batch.to('cuda:0')" in str(found)
    assert str(found).endswith("but got mat1 is on cpu")
    plain: Any = SimpleNamespace(module=nn.Linear(2, 2))
    assert explained(error, [plain], None, "[rank 0 of 1]") is None


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 3) -> list[Tensor]:
    """Trains on seeded batches and returns the parameters on the host."""
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(device)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("wrapped_first", ["optimizer", "model"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.SGD])
def test_a_state_of_the_cpu_goes_on_on_a_gpu(kind: Any, fused: bool, wrapped_first: str) -> None:
    """Adagrad has a state from the start; the others have taken steps on the CPU before."""
    strategy = fleet.DistributedStrategy()
    strategy.build_strategy.fuse_all_optimizer_ops = fused
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(net.parameters(), 0.1, **more)
    trained(net, optimizer, "cpu")
    reference = copy.deepcopy(net)
    same = kind(reference.parameters(), 0.1, **more)
    same.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if wrapped_first == "optimizer":
        stepped = fleet.distributed_optimizer(optimizer)
        model: nn.Module = fleet.distributed_model(net)
    else:
        model = fleet.distributed_model(net)
        stepped = fleet.distributed_optimizer(optimizer)
    found = trained(model, stepped, "cuda")
    torch.testing.assert_close(found, trained(reference, same, "cpu"), atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="move each batch there, too"):
        model(torch.ones(2, 4))


@pytest.mark.gpu
def test_transforms_write_where_they_read() -> None:
    from fleet.features import Bucketize, Transforms

    found = Transforms([Bucketize("age", [10.0, 20.0], out="group")])({"age": torch.tensor([5.0, 15.0]).cuda()})
    assert (found["group"].device.type, found["group"].tolist()) == ("cuda", [0, 1])
