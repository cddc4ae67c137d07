"""Stage 2 keeps whole parameters: loops that read, write and share them equal one process, or are refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fleet import fleet
from tests.helpers.checked_training import batch, flat, message, start, weights
from tests.helpers.workers import run_workers

STEPS = 4


def network() -> Any:
    """Returns layers whose rows two workers do not divide evenly, one row among them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.02, eps=1e-3, weight_decay=0.1)


class Loop:
    """A training loop, on this worker's rows of each batch or, in one process, on all of them."""

    def __init__(self, distributed: bool, net: Any = None, rule: Callable[[Any], Any] = adam) -> None:
        self.net = net or network()
        self.distributed = distributed
        self.raw = self.optimizer = rule(self.net.parameters())
        self.model = self.net
        if distributed:
            self.optimizer = fleet.distributed_optimizer(self.raw)
            self.model = fleet.distributed_model(self.net)

    def loss(self, step: int) -> Tensor:
        """Returns the loss of the rows of ``step``."""
        x = batch(step, fleet.worker_index()) if self.distributed else torch.cat([batch(step, 0), batch(step, 1)])
        found: Tensor = self.model(x.to(next(self.net.parameters()).dtype)).square().mean()
        return found

    def update(self) -> None:
        """Steps and clears."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self, gradient: Any) -> Tensor:
        """Returns the whole of a gradient."""
        return gradient.full_tensor() if self.distributed else gradient  # type: ignore[no-any-return]


def decay_by_hand(loop: Loop) -> None:
    for step in range(STEPS):
        loop.loss(step).backward()
        for p in loop.net.parameters():
            if p.shape[0] > 1:
                p.grad.add_(p, alpha=0.1).mul_(0.5)
            else:  # torch adds nothing in place to a shard of which a worker has no row
                p.grad = (p.grad + 0.1 * p) * 0.5
        loop.update()


def penalty_of_weights_and_gradients(loop: Loop) -> None:
    for step in range(STEPS):
        loss = loop.loss(step)
        slopes = torch.autograd.grad(loss, list(loop.net.parameters()), create_graph=True)
        penalty = sum(p.square().sum() for p in loop.net.parameters())
        if not loop.distributed:  # each worker has the slopes of its own rows
            halves = [loop.model(batch(step, rank)).square().mean() for rank in range(2)]
            each = [torch.autograd.grad(h, list(loop.net.parameters()), create_graph=True) for h in halves]
            total = sum(s.square().sum() for slopes in each for s in slopes) / 2
        else:
            total = sum(s.square().sum() for s in slopes)
        (loss + 0.01 * penalty + 0.1 * total).backward()
        loop.update()


def two_backward_passes(loop: Loop) -> None:
    for step in range(STEPS):
        loss = loop.loss(step)
        loss.backward(retain_graph=True)
        loss.backward()
        loop.loss(step + 9).backward()
        loop.update()


def read_without_a_call(loop: Loop) -> None:
    for step in range(STEPS):
        loss = loop.loss(step)
        (loss + nn.functional.linear(torch.ones(1, 5), loop.net[2].weight).sum()).backward()
        loop.update()


def local_passes(loop: Loop) -> None:
    """Local passes before and after one that exchanges; gradients that are cleared, and that stay as zeros."""
    for step in range(STEPS):
        loop.loss(step).backward()
        if loop.distributed:
            with loop.model.no_sync():
                loop.loss(step + 5).backward()
        else:
            loop.loss(step + 5).backward()
        loop.loss(step + 7).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=step % 2 == 0)
        if loop.distributed:
            with loop.model.no_sync():
                loop.loss(step + 11).backward()
        for p in loop.net.parameters():
            p.grad = None


def frozen_in_turns(loop: Loop) -> None:
    for step in range(STEPS):
        loop.net[0].requires_grad_(step % 2 == 0)
        loop.net[2].bias.requires_grad_(step % 2 == 1)
        loop.loss(step).backward()
        loop.update()


def a_group_that_comes_later(loop: Loop) -> None:
    late = list(loop.net[2].parameters())
    loop.raw.param_groups[0]["params"][:] = [p for p in loop.net.parameters() if not any(p is one for one in late)]
    for step in range(STEPS):
        if step == 2:
            loop.optimizer.add_param_group({"params": late, "lr": 0.05})
        loop.loss(step).backward()
        loop.update()


def written_and_converted(loop: Loop) -> None:
    for step in range(STEPS):
        loss = loop.loss(step)
        with torch.no_grad():
            loop.net[0].bias.data = loop.net[0].bias.data * 0.5
        loss.backward()
        loop.net[2].double().float()
        loop.update()
        loop.net[0].double().float()
        loop.net[2].weight.data.clamp_(-0.2, 0.2)


def updated_by_hand(loop: Loop) -> None:
    velocity = {p: torch.zeros_like(p) for p in loop.net.parameters()}
    for step in range(STEPS):
        loop.loss(step).backward()
        with torch.no_grad():
            for p, v in velocity.items():
                v.mul_(0.9).add_(p.grad)
                p.sub_(v, alpha=0.1)
                p.copy_(p - 0.1 * p.grad)
                p.data = p.data - 0.1 * p.grad
                p.data -= 0.1 * p.grad.data
            torch._foreach_add_(list(velocity), [p.grad for p in velocity], alpha=-0.1)
        loop.model.zero_grad()


def frozen_after_forward(loop: Loop) -> None:
    for step in range(STEPS):
        loop.loss(step).backward()
        loss = loop.loss(step)
        loop.net[0].requires_grad_(False)
        loss.backward()
        loop.net[0].requires_grad_(True)
        loop.update()
        loss = loop.loss(step)
        loop.net[2].requires_grad_(False)
        loss.backward()
        loop.net[2].requires_grad_(True)
        loop.update()


def hooked_in_local_passes(loop: Loop) -> None:
    calls: list[nn.Parameter] = []
    loop.net[0].weight.register_post_accumulate_grad_hook(calls.append)
    for step in range(STEPS):
        with loop.model.no_sync() if loop.distributed else nullcontext():
            loop.loss(step).backward()
        loop.loss(step).backward()
        loop.update()
    assert len(calls) == 2 * STEPS


def stepped_with_zeros(loop: Loop) -> None:
    for step in range(STEPS):
        loop.loss(step).backward()
        loop.optimizer.step()
        loop.model.zero_grad(set_to_none=False)
        loop.update()


def gradients_of_the_script(loop: Loop) -> None:
    for step in range(STEPS):
        loop.loss(step).backward()
        for p in loop.net.parameters():
            p.grad = loop.whole(p.grad).sign()
        nn.utils.clip_grad_norm_(loop.net.parameters(), 0.7)
        loop.update()


def clipped(loop: Loop) -> None:
    for step in range(STEPS):
        loop.loss(step).backward()
        norm = nn.utils.clip_grad_norm_(loop.net.parameters(), 0.01)
        assert norm.item() > 0.01
        loop.update()


def average_of_weights(loop: Loop) -> None:
    average = torch.optim.swa_utils.AveragedModel(loop.model)
    for step in range(STEPS):
        loop.loss(step).backward()
        loop.update()
        average.update_parameters(loop.model)
    module = average.module.module if loop.distributed else average.module
    for p, mean in zip(loop.net.parameters(), module.parameters(), strict=True):
        p.data.copy_(mean)


LOOPS = (
    decay_by_hand, penalty_of_weights_and_gradients, two_backward_passes, read_without_a_call, local_passes,
    frozen_in_turns, a_group_that_comes_later, written_and_converted, updated_by_hand,
    frozen_after_forward, hooked_in_local_passes, stepped_with_zeros, gradients_of_the_script, clipped,
    average_of_weights,
)  # fmt: skip


def train(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Tensor]:
    warnings.simplefilter("error")
    found = {}
    for loop in LOOPS:
        start({"sharding": True, "sharding_configs": {"stage": 2, **options}})
        made = Loop(distributed=True)
        loop(made)
        found[loop.__name__] = weights(made.model)
    return found


@pytest.mark.parametrize("options", [{}, {"segment_broadcast_MB": 3e-5}], ids=["one bucket", "many buckets"])
def test_loops_equal_one_process(options: dict[str, Any]) -> None:
    """Issue 36: half of the refusals of stage 2 came from parameters that were shards."""
    first, second = run_workers(train, 2, options, backend=None)
    for loop in LOOPS:
        plain = Loop(distributed=False)
        loop(plain)
        name = loop.__name__
        torch.testing.assert_close(first[name], flat(plain.net.state_dict()), rtol=1e-5, atol=2e-6, msg=name)
        torch.testing.assert_close(first[name], second[name], rtol=0, atol=0)


def merged(rank: int, world_size: int) -> dict[str, Tensor]:
    """Trains with two batches to an update, cleared in all ways between them."""
    warnings.simplefilter("error")
    found = {}
    for clear in ("none", "zeros", "model"):
        start({"sharding": True, "sharding_configs": {"stage": 2, "gradient_merge_acc_step": 2}})
        loop = Loop(distributed=True)
        for step in range(6):
            if clear == "model":
                loop.model.zero_grad()
            else:
                loop.optimizer.zero_grad(set_to_none=clear == "none")
            loop.loss(step).backward()
            nn.utils.clip_grad_norm_(loop.net.parameters(), 0.5)
            loop.optimizer.step()
        found[clear] = weights(loop.model)
    return found


def test_merged_batches_equal_one_process() -> None:
    plain = Loop(distributed=False)
    for step in range(0, 6, 2):
        ((plain.loss(step) + plain.loss(step + 1)) / 2).backward()
        nn.utils.clip_grad_norm_(plain.net.parameters(), 0.5)
        plain.update()
    for found in run_workers(merged, 2, backend=None):
        for clear, state in found.items():
            torch.testing.assert_close(state, flat(plain.net.state_dict()), rtol=1e-5, atol=2e-6, msg=clear)


def corners(rank: int, world_size: int) -> dict[str, Any]:
    """Looks at gradients, hooks, copies and types."""
    found: dict[str, Any] = {}
    start({"sharding": True, "sharding_configs": {"stage": 2}})
    loop, seen = Loop(distributed=True), []
    weight = loop.net[0].weight
    with loop.model.no_sync():
        loop.loss(0).backward()
    found["local"] = type(weight.grad) is Tensor and weight.grad.shape == (5, 4)
    loop.loss(0).backward()
    found["shards"] = [(tuple(p.grad.shape), tuple(p.grad.to_local().shape)) for p in loop.net.parameters()]
    found["number"] = message(lambda: weight.grad.norm().item())
    loop.update()
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad).__name__))
    loop.loss(1).backward()
    handle.remove()
    loop.loss(2).backward()
    found["seen"] = seen
    twin = copy.deepcopy(loop.model)
    found["twin"] = torch.equal(twin(batch(0, 0)), loop.model(batch(0, 0)))
    found["trained twin"] = message(lambda: twin(batch(0, 0)).sum().backward())
    file = io.BytesIO()
    torch.save(loop.net, file)
    file.seek(0)
    found["file"] = torch.equal(torch.load(file, weights_only=False)(batch(0, 0)), loop.net(batch(0, 0)))
    for kind in (torch.bfloat16, torch.float64):
        start({"sharding": True, "sharding_configs": {"stage": 2}})
        loop = Loop(True, network().to(kind), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9))
        for step in range(3):
            loop.loss(step).backward()
            loop.update()
        found[f"{kind}"] = weights(loop.model)
    start({"sharding": True, "sharding_configs": {"stage": 2}})
    net = network()
    net[2].double()
    net[1] = Casts(torch.float64)
    net[3] = nn.Sequential(Casts(torch.float32), net[3])
    loop = Loop(True, net)
    loop.loss(0).backward()
    found["types"] = [str(p.grad.dtype) for p in net.parameters()]
    return found


class Casts(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().to(self.kind)


def test_gradients_hooks_copies_and_types() -> None:
    rows = [[(3, 4), (3,), (2, 5), (2,), (1, 3), (1,)], [(2, 4), (2,), (1, 5), (1,), (0, 3), (0,)]]
    shapes = [(5, 4), (5,), (3, 5), (3,), (1, 3), (1,)]
    plain = {}
    for kind in (torch.bfloat16, torch.float64):
        loop = Loop(False, network().to(kind), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9))
        for step in range(3):
            loop.loss(step).backward()
            loop.update()
        plain[f"{kind}"] = flat(loop.net.state_dict())
    for rank, found in enumerate(run_workers(corners, 2, backend=None)):
        assert found["local"] is found["twin"] is found["file"] is True
        assert found["shards"] == list(zip(shapes, rows[rank], strict=True))
        assert ".full_tensor() first, on every worker" in found["number"]
        assert found["seen"] == ["DTensor"]
        assert "backward() reached a copy of a model" in found["trained twin"]
        torch.testing.assert_close(found["torch.bfloat16"], plain["torch.bfloat16"], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found["torch.float64"], plain["torch.float64"], rtol=1e-12, atol=1e-12)
        assert found["types"] == ["torch.float32"] * 2 + ["torch.float64"] * 2 + ["torch.float32"] * 2
