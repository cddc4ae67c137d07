"""dgc: the written-out algorithm on two workers, conservation, the rampup, the bytes on the wire, and resuming."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fleet
from fleet.errors import ConfigError
from fleet.strategies import dgc
from fleet.strategies.dgc import Compressor, DgcConfig
from tests.helpers.workers import run_workers

STEPS, RATE, MOMENTUM, DECAY = 9, 0.1, 0.9, 0.01


def net_of(seed: int) -> nn.Sequential:
    """Returns a net with one large weight (20,000 entries) and small ones."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    """Returns the data of one worker at one step."""
    return torch.randn(8, 100, generator=torch.Generator().manual_seed(1000 * step + rank))


def made(rank: int, nesterov: bool, begin: int) -> tuple[Any, Any]:
    """Returns model and optimizer under dgc with a rampup of two sparsities over four steps."""
    strategy = fleet.DistributedStrategy()
    strategy.dgc = True
    strategy.dgc_configs = {"rampup_begin_step": begin, "rampup_step": 4, "sparsity": [0.75, 0.99]}
    fleet.init(is_collective=True, strategy=strategy)
    net = net_of(rank)
    sgd = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=nesterov, weight_decay=DECAY)
    return fleet.distributed_model(net), fleet.distributed_optimizer(sgd)


def train(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    """Runs the plain loop."""
    for step in steps:
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def run(rank: int, world_size: int, nesterov: bool, begin: int) -> dict[str, Any]:
    """Trains STEPS steps and returns the parameters."""
    model, optimizer = made(rank, nesterov, begin)
    train(model, optimizer, rank, range(STEPS))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def reference(num_workers: int, nesterov: bool, begin: int) -> dict[str, np.ndarray]:
    """A.6 written out for all workers in one process, in numpy."""
    net = net_of(0)
    p = {name: value.detach().numpy() for name, value in net.named_parameters()}
    velocity = {name: np.zeros_like(value) for name, value in p.items()}
    u = [np.zeros_like(p["0.weight"]) for _ in range(num_workers)]
    v = [np.zeros_like(p["0.weight"]) for _ in range(num_workers)]
    for step in range(STEPS):
        local = []
        for rank in range(num_workers):
            net.zero_grad()
            net(batch(step, rank)).square().mean().backward()
            local.append({name: value.grad.numpy().copy() for name, value in net.named_parameters()})
        for name, value in p.items():
            if name == "0.weight" and step >= begin:
                sparsity = [0.75, 0.99][min(int((step - begin) * 2 / 4), 1)]
                k, total = int(value.size * (1 - sparsity)), np.zeros_like(value)
                for rank in range(num_workers):
                    g = local[rank][name] + DECAY * value
                    u[rank] = MOMENTUM * (u[rank] + g) if nesterov else MOMENTUM * u[rank] + g
                    v[rank] = v[rank] + u[rank] + (g if nesterov else 0)
                    sent = np.argsort(-np.abs(v[rank]).ravel(), kind="stable")[:k]
                    total.ravel()[sent] += v[rank].ravel()[sent]
                    u[rank].ravel()[sent] = v[rank].ravel()[sent] = 0
                value -= np.float32(RATE) * total / num_workers
            else:
                g = sum(part[name] for part in local) / num_workers + DECAY * value
                velocity[name] = MOMENTUM * velocity[name] + g
                value -= np.float32(RATE) * (g + MOMENTUM * velocity[name] if nesterov else velocity[name])
    return p


@pytest.mark.parametrize(("nesterov", "begin"), [(False, 0), (True, 3)])
def test_equals_the_written_out_algorithm(nesterov: bool, begin: int) -> None:
    """A.6: momentum correction, factor masking, rampup, per-parameter top-k, dense path for small parameters."""
    expected = reference(2, nesterov, begin)
    first, second = run_workers(run, 2, nesterov, begin, backend=None)
    for name, value in expected.items():
        np.testing.assert_allclose(first[name].numpy(), value, atol=3e-6, rtol=1e-4, err_msg=name)
        torch.testing.assert_close(first[name], second[name], atol=0, rtol=0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.booleans(), st.floats(0.0, 0.999), st.integers(1, 4))
def test_sent_plus_kept_is_what_came_in(seed: int, nesterov: bool, sparsity: float, steps: int) -> None:
    """Issue 3, proof 3: with momentum 0, all that was sent plus what is held back is the sum of the gradients."""
    torch.manual_seed(seed)
    parameter = nn.Parameter(torch.zeros(128, 128))
    compressor = Compressor(DgcConfig(sparsity=(sparsity,)))
    compressor.groups = {parameter: {"momentum": 0.0, "nesterov": nesterov, "weight_decay": 0.0}}
    sent, came = torch.zeros(128 * 128), torch.zeros(128 * 128)
    for _ in range(steps):
        gradient = torch.randn(128, 128)
        came += gradient.flatten()
        index, value = compressor.select(parameter, gradient)
        assert len(index) == max(1, int(128 * 128 * (1 - sparsity)))
        sent.index_add_(0, index.long(), value)
        compressor.steps += 1
    torch.testing.assert_close(sent + compressor.v[parameter], came, atol=1e-4, rtol=1e-4)


def resume(rank: int, world_size: int) -> dict[str, Any]:
    """Stops in the middle of the rampup and resumes from the worker's own state; then from worker 0's."""
    model, optimizer = made(0, False, 1)
    train(model, optimizer, rank, range(4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, rank, range(4, STEPS))
    again, second = made(7, False, 1)
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    train(again, second, rank, range(4, STEPS))
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    foreign = copy.deepcopy(saved[1])
    foreign["dgc"]["rank"] = 5
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.load_state_dict(foreign)
    said = " ".join(str(w.message) for w in caught)
    kept = len(second.state_dict()["dgc"]["v"])
    try:
        bad = copy.deepcopy(saved[1])
        bad["dgc"]["v"] = {0: torch.zeros(3)}
        second.load_state_dict(bad)
        error = ""
    except ConfigError as caught_error:
        error = str(caught_error)
    return {"same": same, "said": said, "kept": kept, "error": error}


def test_state_resumes_inside_the_rampup() -> None:
    """Issue 3, proof 4: each worker's own state resumes exactly; another worker's is taken with a note."""
    for result in run_workers(resume, 2, backend=None):
        assert result["same"]
        assert "nothing held back" in result["said"]
        assert result["kept"] == 0
        assert "3 entries for parameter 0" in result["error"]


def count_bytes(rank: int, world_size: int) -> dict[str, int]:
    """Counts the bytes that this worker hands to collectives in one dense and one sparse step."""
    strategy = fleet.DistributedStrategy()
    strategy.dgc = True
    strategy.dgc_configs = {"rampup_begin_step": 1, "sparsity": [0.999]}
    fleet.init(is_collective=True, strategy=strategy)
    net = nn.Linear(1000, 1000, bias=False)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    model = fleet.distributed_model(net)
    counted = [0]
    real_reduce, real_gather = torch.distributed.all_reduce, dgc.gather_into

    def reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counted[0] += tensor.numel() * tensor.element_size()
        return real_reduce(tensor, *args, **kwargs)

    def gather(out: torch.Tensor, tensor: torch.Tensor, **kwargs: Any) -> Any:
        counted[0] += tensor.numel() * tensor.element_size()
        return real_gather(out, tensor, **kwargs)

    torch.distributed.all_reduce, dgc.gather_into = reduce, gather
    found = {}
    for name in ("dense", "sparse"):
        counted[0] = 0
        model(torch.ones(2, 1000)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found[name] = counted[0]
    torch.distributed.all_reduce, dgc.gather_into = real_reduce, real_gather
    return found


def test_fewer_bytes_cross_the_wire() -> None:
    """Issue 3: at sparsity 0.999 a worker sends at most 1 % of the dense bytes."""
    found = run_workers(count_bytes, 2, backend=None)[0]
    assert found["dense"] == 4_000_000
    assert 0 < found["sparse"] <= 0.01 * found["dense"]


def accumulated(rank: int, world_size: int) -> dict[str, Any]:
    """Accumulates two halves of a batch in one step, under no_sync() and without; and drops a step."""
    found: dict[str, Any] = {}
    for halves in (1, 2):
        model, optimizer = made(0, False, 0)
        for step in range(STEPS):
            parts = batch(step, rank).chunk(halves)
            for part in parts[:-1]:
                with model.no_sync():
                    (model(part).square().mean() / halves).backward()
            (model(parts[-1]).square().mean() / halves).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[f"halves {halves}"] = [p.detach().clone() for p in model.parameters()]
    for name in ("twice", "dropped", "not cleared"):
        model, optimizer = made(0, False, 0)
        model(batch(0, rank)).square().mean().backward()
        if name == "dropped":
            optimizer.zero_grad()
        if name == "not cleared":
            optimizer.step()
        try:
            model(batch(1, rank)).square().mean().backward()
        except ConfigError as error:
            found[name] = str(error)
    model, optimizer = made(0, False, 0)
    optimizer.register_step_pre_hook(lambda *_: None)
    model(batch(0, rank)).square().mean().backward()
    try:
        optimizer.step()
    except ConfigError as error:
        found["hook"] = str(error)
    return found


def test_nothing_is_sent_twice() -> None:
    """Issue 9, 1.6: two halves under no_sync() are the whole; a second exchange for one step is refused, and why."""
    for found in run_workers(accumulated, 2, backend=None):
        torch.testing.assert_close(found["halves 2"], found["halves 1"], atol=3e-6, rtol=1e-4)
        assert "no_sync()" in found["twice"]
        assert "without a step()" in found["dropped"]
        assert "zero_grad() after step()" in found["not cleared"]
        assert "step hooks" in found["hook"]


def two_optimizers(rank: int, world_size: int) -> list[list[int]]:
    """Counts what is exchanged for two models with an optimizer each, in three steps."""
    strategy = fleet.DistributedStrategy()
    strategy.dgc = True
    strategy.dgc_configs = {"rampup_begin_step": 1, "sparsity": [0.999]}
    fleet.init(is_collective=True, strategy=strategy)
    nets = [nn.Linear(128, 128, bias=False) for _ in range(2)]
    optimizers = [fleet.distributed_optimizer(torch.optim.SGD(n.parameters(), lr=0.1, momentum=0.9)) for n in nets]
    models = [fleet.distributed_model(net) for net in nets]
    counted: list[list[int]] = [[], []]
    for step in range(3):
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model(torch.randn(8, 128, generator=torch.Generator().manual_seed(step + rank))).square().mean().backward()
            counted[place].append(int((nets[place].weight.grad != 0).sum()))
            optimizer.step()
            optimizer.zero_grad()
    return counted


def test_each_optimizer_has_its_compressor() -> None:
    """Issue 9, 1.5: both models start dense, at their own step 0, and send at most 16 entries per worker afterwards."""
    for counted in run_workers(two_optimizers, 2, backend=None):
        for dense, *sparse in counted:
            assert dense > 16_000
            assert all(0 < count <= 32 for count in sparse)


def test_a_scaler_is_refused() -> None:
    """Issue 9: what is held back would be of an older scale; a scaler that is off changes nothing."""
    strategy = dgc.Dgc(DgcConfig(), None)  # type: ignore[arg-type]
    strategy.use_scaler(torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(ConfigError, match="dgc on"):
        strategy.use_scaler(torch.amp.GradScaler("cpu"))
