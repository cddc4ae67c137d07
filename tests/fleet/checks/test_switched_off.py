"""Each invariant catches its kinds: where it is switched off, the run is wrong without a word.

The comparison of copies sees several of these faults an update later, so it is off beside the invariant under test.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import spectral_norm

from fleet import fleet
from fleet.checks.copies import Copies
from fleet.checks.exchanged_gradients import ExchangedGradients
from fleet.checks.one_loss import OneLoss
from fleet.errors import FleetError
from fleet.strategies._gradients.arrivals import Arrivals
from fleet.strategies._shared import segments
from fleet.strategies._shared.segments import SegmentState
from fleet.strategies.sharding import divided_model
from fleet.strategies.sharding.unit_order import UnitOrder
from tests.helpers.checked_training import OPTIONS, batch, start
from tests.helpers.workers import run_workers

STEPS = 2


class Branches(nn.Module):
    """A body and two branches of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor, which: str = "ab") -> Tensor:
        x = torch.tanh(self.body(x))
        return sum((getattr(self, name)(x) for name in which), torch.zeros(()))


def normed() -> nn.Module:
    """Returns layers whose forward changes their buffers."""
    torch.manual_seed(0)
    return nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh(), spectral_norm(nn.Linear(4, 4)))


def whole(model: Any, step: int, rank: int, *args: Any) -> None:
    model(batch(step, rank), *args).square().mean().backward()


def branch_of_own(model: Any, step: int, rank: int) -> None:
    whole(model, step, rank, "ab"[rank])


def unused_at_the_end(model: Any, step: int, rank: int) -> None:
    whole(model, step, rank, "ab" if step + 1 < STEPS else "a")


def last_stays_local(model: Any, step: int, rank: int) -> None:
    whole(model, step, rank)
    with getattr(model, "no_sync", nullcontext)():
        whole(model, step + 10, rank)


def weight_of_one(model: Any, rank: int) -> None:
    if rank == 1:
        with torch.no_grad():
            model.body.weight.add_(0.1)


def clip_by_hand(model: Any, rank: int) -> None:
    for p in model.parameters():
        p.grad /= p.grad.norm().item()


@contextmanager
def without_segment_states() -> Iterator[None]:
    @contextmanager
    def run(state: SegmentState) -> Iterator[None]:
        state.has_run = True
        yield

    with (
        patch.object(SegmentState, "first", run),
        patch.object(SegmentState, "again", run),
        patch.object(segments, "is_new", lambda *_: False),  # so no outputs are compared
    ):
        yield


@contextmanager
def without_part_rules() -> Iterator[None]:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    operation = torch.ops.aten._local_scalar_dense.default
    with patch.dict(handlers), patch.object(divided_model, "keep_part_rules", lambda *_: None):
        handlers.pop(operation, None)
        yield


def without(owner: type, name: str) -> Any:
    return lambda: patch.object(owner, name, lambda *_, **__: None)


@dataclass(frozen=True)
class Kind:
    """A loop of ``replicas`` with their own rows, how its invariant is switched off, and the refusal ("": right)."""

    off: Callable[[], Any]
    refusal: str
    one_pass: Callable[..., None] = whole
    before_step: Callable[[Any, int], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    made: Callable[[], nn.Module] = Branches
    replicas: int = 2


# A loss of the columns that each worker along mp holds.
MP = {"check_every": 1, "hybrid_configs": {"mp_degree": 2}, "tensor_parallel_configs": {"plan": {"0": "column"}}}
KINDS = {
    "1": Kind(
        without(Copies, "_post"), "'body.weight' (worker 1", before_step=weight_of_one, options={"check_every": 1}
    ),
    "2, stage 3": Kind(
        without(UnitOrder, "check"), "find_unused_parameters", branch_of_own, options=OPTIONS["stage 3"]
    ),
    "2, data parallel": Kind(without(Arrivals, "end"), "took no part in the loss", unused_at_the_end),
    "3": Kind(without(ExchangedGradients, "_check_step"), "has exchanged what was added", last_stays_local),
    "4": Kind(
        without(OneLoss, "_compare"),
        "began backward from different losses",
        options=MP,
        made=lambda: nn.Sequential(nn.Linear(4, 4)),
        replicas=1,
    ),
    "5": Kind(
        without_segment_states,
        "",
        options={"recompute": True, "recompute_configs": {"checkpoints": ["0", "2"]}},
        made=normed,
        replicas=1,
    ),
    "6": Kind(without_part_rules, "of a sharded tensor", before_step=clip_by_hand, options=OPTIONS["stage 3"]),
}


def distance(kind: Kind, rank: int) -> float:
    """Returns how far the weights are from those of one process, after steps of both workers."""
    start({"check_every": 0, **kind.options})
    plain, net = kind.made(), kind.made()
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(net.parameters(), 0.1))
    model: Any = fleet.distributed_model(net)
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(STEPS):
        kind.one_pass(model, step, rank % kind.replicas)
        for each in range(kind.replicas):
            kind.one_pass(plain, step, each)
        for p in plain.parameters():
            p.grad = None if p.grad is None else p.grad / kind.replicas
        for one, used, place in ((optimizer, model, rank), (reference, plain, 0)):
            if kind.before_step is not None:
                kind.before_step(used, place)
            one.step()
            one.zero_grad()
    state = model.full_state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


def run_all(rank: int, world_size: int) -> dict[str, tuple[str, float]]:
    warnings.simplefilter("error")
    found = {}
    for name, kind in KINDS.items():
        for is_off in (False, True):
            with ExitStack() as stack:
                if is_off:
                    stack.enter_context(kind.off())
                try:
                    found[f"{name}{' off' if is_off else ''}"] = ("", distance(kind, rank))
                except FleetError as error:
                    found[f"{name}{' off' if is_off else ''}"] = (f"{error}", 0.0)
    return found


@pytest.mark.slow
def test_without_an_invariant_its_kinds_are_silent_again() -> None:
    """Issue 36: refused or right with the invariant, and without it wrong on some worker, with no error or warning."""
    workers = run_workers(run_all, 2, backend=None)
    for name, kind in KINDS.items():
        for found in workers:
            said, far = found[name]
            assert kind.refusal in said, name
            assert bool(said) == bool(kind.refusal), said
            assert far < 1e-6, name
        without_it = [found[f"{name} off"] for found in workers]
        assert [said for said, _ in without_it] == ["", ""], name
        assert max(far for _, far in without_it) > 1e-4, name
