"""Copies that come apart while a job trains, and the same loops without the fault."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fleet import fleet
from fleet.checks import copies
from fleet.checks.copies import distance_of, sketch
from fleet.errors import ConfigError
from tests.helpers.checked_training import OPTIONS, batch, job, message, network, step_once, weights
from tests.helpers.workers import run_workers

EVERY = {"check_every": 2}
Between = Callable[[int, int, Any, Any, Any], None]  # rank, step, module, optimizer, loss


def trained(rank: int, between: Between, options: Any = EVERY, net: nn.Module | None = None, steps: int = 8) -> Any:
    """Trains and calls ``between`` after each step; returns the model."""
    module, _, optimizer, model = job(options, net)
    for step in range(steps):
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            between(rank, step, module, optimizer, loss)
    return model


def weight_of_one(rank: int, step: int, net: Any, *_: Any) -> None:
    if rank == 0 and step == 4:
        net[0].weight.data.mul_(1.01)


def assigned_by_one(rank: int, step: int, net: Any, *_: Any) -> None:
    if rank == 1 and step == 4:
        net[2].bias.data = net[2].bias.data + 0.1


def places_changed(rank: int, step: int, net: Any, *_: Any) -> None:
    if rank == 1 and step == 0:
        net[0].bias[:2] = net[0].bias[:2].flip(0)


def noise_of_own(rank: int, step: int, net: Any, *_: Any) -> None:
    noise = torch.randn(net[0].weight.shape, generator=torch.Generator().manual_seed(rank))
    net[0].weight.add_(noise, alpha=1e-3)


def average_of_own(rank: int, step: int, net: Any, *_: Any) -> None:
    """An average of the weights with a decay of the worker's own, put into the model."""
    net.average = torch.lerp(getattr(net, "average", net[2].weight), net[2].weight, 0.5 + 0.1 * rank)
    if step == 3:
        net[2].weight.copy_(net.average)


def frozen_of_own(rank: int, step: int, net: Any, *_: Any) -> None:
    net[0].bias.requires_grad_(False)
    if step > 2:
        net[0].bias.add_(rank)


def decay_later(rank: int, step: int, net: Any, optimizer: Any, *_: Any) -> None:
    if step == 3:
        optimizer.param_groups[0]["weight_decay"] = 0.1 * rank


def rate_by_own_loss(rank: int, step: int, net: Any, optimizer: Any, loss: Tensor) -> None:
    if step == 0:
        net.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    net.scheduler.step(float(loss) if rank == 0 else 1.0 / (1 + step))


def scheduler_of_one(rank: int, step: int, net: Any, optimizer: Any, *_: Any) -> None:
    if step == 0:
        net.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    if rank == 0:
        net.scheduler.step()


def warmup_of_own(rank: int, step: int, net: Any, optimizer: Any, *_: Any) -> None:
    optimizer.set_lr(0.1 * min(1.0, (step + 1) / (4 + rank)))


def momentum_of_own(rank: int, step: int, net: Any, optimizer: Any, *_: Any) -> None:
    if step == 3 and rank == 1:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()


def gradients_of_own(rank: int) -> None:
    """Gradients that are clipped to a norm of the worker's own, after the exchange."""
    _, _, optimizer, model = job(EVERY)
    for step in range(4):
        loss = model(batch(step, rank)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), float(loss.detach()) / 10)
        optimizer.step()
        optimizer.zero_grad()


APART: dict[Between, str] = {
    weight_of_one: "'0.weight' (worker 1 against worker 0): equal after update 4, different after update 6",
    assigned_by_one: "'2.bias' (worker 1 against worker 0)",
    places_changed: "'0.bias' (worker 1 against worker 0): equal after update 1, different after update 2",
    noise_of_own: "'0.weight' (worker 1 against worker 0)",
    average_of_own: "'2.weight' (worker 1 against worker 0)",
    frozen_of_own: "'0.bias' (worker 1 against worker 0)",
    decay_later: "'weight_decay of group 0' (0.1 on worker 1 against 0.0 on worker 0): equal after update 4",
    rate_by_own_loss: "'lr of group 0' (0.1 on worker 1 against",
    scheduler_of_one: "'lr of group 0' (0.1 on worker 1 against 0.09",
    warmup_of_own: "'lr of group 0' (0.02",
    momentum_of_own: "'0.weight' (worker 1 against worker 0)",
}


def come_apart(rank: int, world_size: int) -> dict[str, str]:
    found = {f"{apart.__name__}": message(lambda apart=apart: trained(rank, apart)) for apart in APART}
    found["clipped"] = message(lambda: gradients_of_own(rank))
    found["stage 1"] = message(lambda: trained(rank, frozen_of_own, {**OPTIONS["stage 1"], **EVERY}))
    for name in ("fp16_allreduce", "amp", "gradient_merge"):
        found[name] = message(lambda name=name: trained(rank, noise_of_own, {**OPTIONS[name], **EVERY}))
    for name in ("stage 2", "stage 3", "localsgd"):
        found[name] = message(lambda name=name: trained(rank, warmup_of_own, {**OPTIONS[name], **EVERY}))
    found["off"] = message(lambda: trained(rank, noise_of_own, {"check_every": 0}))
    return found


def test_copies_that_come_apart_are_named() -> None:
    """Issue 36: weights, settings and states that one worker changes alone."""
    for said in run_workers(come_apart, 2, backend=None):
        for apart, text in APART.items():
            assert text in said[apart.__name__], apart
        assert "different after update 1" in said["clipped"]
        for name in ("fp16_allreduce", "amp", "gradient_merge"):
            assert "'0.weight' (worker 1 against worker 0)" in said[name], name
        for name in ("stage 2", "stage 3", "localsgd"):
            assert "'lr of group 0'" in said[name], name
        assert said["off"] == ""


def nothing(*_: Any) -> None:
    return


def alike(rank: int, step: int, net: Any, optimizer: Any, *_: Any) -> None:
    """What the loops above do, on every worker alike."""
    if step == 4:
        net[2].bias.data = net[2].bias.data + 0.1
    noise = torch.randn(net[0].weight.shape, generator=torch.Generator().manual_seed(step))
    net[0].weight.add_(noise, alpha=1e-3)
    optimizer.set_lr(0.1 / (1 + step))


class Normed(nn.Sequential):
    """Batch norm, whose buffers differ between the workers after each forward, and dropout."""

    def __init__(self) -> None:
        super().__init__(*network(), nn.BatchNorm1d(1), nn.Dropout(0.5))


def two_optimizers(rank: int) -> Tensor:
    """One model trained by two optimizers, of which one steps in every other batch and skips one batch."""
    net = network()
    _, _, first, model = job(EVERY, net)
    second = fleet.distributed_optimizer(torch.optim.AdamW(net[2].parameters(), 0.01))
    for step in range(8):
        model(batch(step, rank)).square().mean().backward()
        first.step()
        if step % 2:
            second.step()
        if step != 5:
            model.zero_grad()
    return weights(model)


def accumulated(rank: int) -> Tensor:
    """Two batches for each update, the first under ``no_sync()``; the last two updates have one batch."""
    _, _, optimizer, model = job(EVERY)
    for step in range(6):
        if step < 4:
            with model.no_sync():
                model(batch(step, rank)).square().mean().backward()
        step_once(model, optimizer, step + 10)
    return weights(model)


def saved_alone(rank: int) -> float:
    """Worker 0 saves after each update; the other one does not."""
    _, _, optimizer, model = job(EVERY)
    total = 0.0
    for step in range(4):
        step_once(model, optimizer, step)
        if rank == 0:
            total = sum(float(value.sum()) for value in model.state_dict().values())
    return total


def joined(rank: int) -> None:
    """Workers with different numbers of batches."""
    _, _, optimizer, model = job(EVERY)
    with model.join():
        for step in range(3 + 2 * rank):
            step_once(model, optimizer, step)


def stay_equal(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", "The `srun` command")
        # job() seeds all workers alike, and Normed has masks.
        warnings.filterwarnings("ignore", ".*draw the same random numbers")
        for name, options in OPTIONS.items():
            change = nothing if name in ("stage 2", "stage 3") else alike
            found[name] = weights(trained(rank, change, {**options, **EVERY}))
        sync = {"sync_batch_norm": True, **EVERY}
        for name, chosen in (("norm", EVERY), ("sync", sync), ("stage 2 norm", {**OPTIONS["stage 2"], **EVERY})):
            torch.manual_seed(rank)
            model = trained(rank, nothing, chosen, Normed())
            found[name] = torch.cat(
                [
                    p.detach().flatten()
                    for p in model.full_state_dict().values()
                    if p.dtype.is_floating_point and p.shape[0:1] != (1,)
                ]
            )
        found["two"] = two_optimizers(rank)
        found["accumulated"] = accumulated(rank)
        saved_alone(rank)
        joined(rank)
    return found


def test_copies_that_stay_equal_pass() -> None:
    """No error and no warning in right loops."""
    first, second = run_workers(stay_equal, 2, backend=None)
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=0, rtol=0, msg=name)


def save_apart(rank: int, world_size: int) -> str:
    _, _, optimizer, model = job(EVERY)
    step_once(model, optimizer, 0)
    with torch.no_grad():
        model.module[0].weight.add_(rank)
    step_once(model, optimizer, 1)
    dist.barrier()
    if rank == 1:
        return ""
    said = message(model.state_dict)
    assert message(model.state_dict) == ""  # it has been said
    return said


def test_a_save_by_worker_0_alone_names_what_is_apart() -> None:
    assert "'0.weight' (worker 1 against worker 0): equal after update 1" in run_workers(save_apart, 2, backend=None)[0]


def unlike(rank: int, world_size: int) -> list[str]:
    """Workers with other numbers of threads."""
    torch.set_num_threads(1 + rank)
    found: list[str] = []
    for change in (1e-7, 0.1):

        def drift(at: int, step: int, net: Any, *_: Any, change: float = change) -> None:
            net[0].weight.add_(at * change)

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(message(lambda drift=drift: trained(rank, drift)))
        found.append("\n".join(f"{warning.filename} {warning.message}" for warning in caught))
    return found


def test_copies_of_unlike_workers_may_drift() -> None:
    for passed, warned, refused, _ in run_workers(unlike, 2, backend=None):
        assert passed == ""
        assert "test_copies.py" in warned
        assert "of their size apart, as rounding makes them on different devices: 1 threads and 2 threads" in warned
        assert "'0.weight' (worker 1 against worker 0)" in refused


def test_the_distance_of_two_sketches_is_about_that_of_the_tensors() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(size) for size in (3, 100_000, 70_000)]
    for scale in (1e-5, 1e-2):
        moved = [tensor + scale * torch.randn_like(tensor) for tensor in tensors]
        assert scale / 2 < distance_of(sketch(tensors), sketch(moved)) < scale * 2
    assert distance_of(sketch(tensors), sketch(tensors)) == 0 == distance_of(sketch([]), sketch([]))


def test_a_sketch_does_not_depend_on_the_default_type() -> None:
    tensors = [torch.ones(5)]
    found = sketch(tensors)
    copies._signs_on.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert sketch(tensors) == found
    finally:
        torch.set_default_dtype(torch.float32)
        copies._signs_on.cache_clear()


class Codebook(nn.Module):
    """Buffers and nothing else; ``mean`` follows the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return (x - self.mean) @ self.codes


class Late(nn.Module):
    """Registers a buffer in its first forward; the model has none before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "start"):
            self.register_buffer("start", x.mean(0).detach())
        return self.inner(x - self.start)


def buffers_everywhere(rank: int, world_size: int) -> dict[str, Tensor]:
    fleet_job = job(EVERY, Late(network()))
    torch.manual_seed(rank)
    _, _, optimizer, model = fleet_job
    codebook, frozen = fleet.distributed_model(Codebook()), Normed().requires_grad_(False)
    teacher = fleet.distributed_model(frozen)
    for step in range(4):
        x = codebook(batch(step, rank))
        (model(x) - teacher(x)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for part in (codebook, model, teacher):
        part(batch(9, 0))  # the buffers of the last forward are sent with the next
    return {name: b.clone() for part in (codebook, model, teacher) for name, b in part.module.named_buffers()}


def test_buffers_are_worker_0s() -> None:
    """Issue 36, module_of_buffers: also without parameters that train, and when registered in forward."""
    first, second = run_workers(buffers_everywhere, 2, backend=None)
    assert first.keys() == second.keys() >= {"codes", "mean", "start", "3.running_mean"}
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-6, rtol=0, msg=name)


def wrapped_inside(rank: int, world_size: int) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    made: list[Callable[[], nn.Module]] = [
        lambda: nn.parallel.DistributedDataParallel(network()),
        lambda: nn.Sequential(nn.parallel.DistributedDataParallel(network()), nn.Linear(1, 1)),
        lambda: fully_shard(network()),
        lambda: FullyShardedDataParallel(network(), device_id=torch.device("cpu")),
    ]
    job({})
    return [message(lambda make=make: fleet.distributed_model(make())) for make in made]


def test_other_wrappers_inside_are_refused() -> None:
    """Issue 36, ddp_inside_fleet."""
    for whole, part, sharded, older in run_workers(wrapped_inside, 2, backend=None):
        assert "the module is torch's DistributedDataParallel" in whole
        assert "'0' is torch's DistributedDataParallel" in part
        assert "FSDPModule" in sharded
        assert "FullyShardedDataParallel" in older


def test_check_every_is_a_number_of_updates() -> None:
    with pytest.raises(ConfigError, match="check_every"):
        fleet.DistributedStrategy().check_every = -1


def along_mp(rank: int, step: int, net: Any, optimizer: Any, *_: Any) -> None:
    """Steps make trained parameters equal along mp; nothing makes frozen ones."""
    net[1].bias.requires_grad_(False)
    if step == 4:
        net[1].bias.add_(rank)


def rate_along_mp(rank: int, step: int, net: Any, optimizer: Any, *_: Any) -> None:
    if step == 4:
        optimizer.set_lr(0.1 / (1 + rank))


def divided(rank: int, between: Between) -> None:
    """Two workers hold parts of the first layer and copies of the second, and see the same rows."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2}
    strategy.check_every = 2
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(0)
    net = nn.Sequential(fleet.meta_parallel.ColumnParallelLinear(4, 8, gather_output=True), nn.Linear(8, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for step in range(8):
        model(batch(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            between(rank, step, net, optimizer, None)


def staged(rank: int, between: Between) -> None:
    """Two workers hold all stages each, and see other rows."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 4}
    strategy.check_every = 2
    fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    torch.manual_seed(0)
    loss = nn.MSELoss()
    net = fleet.meta_parallel.PipelineLayer([nn.Linear(4, 8), nn.Linear(8, 1)], loss_fn=loss)
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(net.parameters(), 0.1))
    model = fleet.distributed_model(net)
    for step in range(8):
        model.train_batch([batch(step, rank), torch.zeros(8, 1)], optimizer)
        with torch.no_grad():
            if step == 4 and between is not nothing:
                next(net.parameters()).add_(rank)


def meshes(rank: int, world_size: int) -> dict[str, str]:
    loops = {"mp": divided, "pp": staged}
    found = {name: message(lambda loop=loop: loop(rank, nothing)) for name, loop in loops.items()}
    found["mp rate"] = message(lambda: divided(rank, rate_along_mp))
    return found | {f"{name} apart": message(lambda loop=loop: loop(rank, along_mp)) for name, loop in loops.items()}


def test_copies_on_a_mesh() -> None:
    """What is whole along mp is compared along mp, and a stage with its copies."""
    for said in run_workers(meshes, 2, backend=None):
        assert said["mp"] == said["pp"] == ""
        assert "'1.bias' (worker 1 against worker 0): equal after update 4" in said["mp apart"]
        assert "'lr of group 0' (0.05 on worker 1 against 0.1 on worker 0)" in said["mp rate"]
        assert "'0.weight' (worker 1 against worker 0): equal after update 4" in said["pp apart"]
